"""One prepared corpus that the reading tests share."""

import pytest

from diffjax.data.prepare import prepare

from .texts import make_config, write_texts


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def config(folder, tmp_path_factory):
    return make_config(data__path=str(folder), data__corpus=str(tmp_path_factory.mktemp("corpora") / "corpus"))


@pytest.fixture(scope="session")
def corpus(config):
    return prepare(config, report=lambda line: None)
