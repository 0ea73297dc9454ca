"""A process that prepares a corpus and kills itself with SIGKILL at its n-th write, or counts its writes (n = -1).

Run as `python -m tests.data.killed_prepare TEXTS CORPUS N`. Prints the number of writes it came to.
"""

import os
import signal
import sys
from pathlib import Path

from diffjax.data import prepare as prepare_module
from diffjax.data import tokenised

from .texts import make_config

count = 0


def counted(function):
    """`function`, but before it does anything the process may die."""

    def wrapper(*arguments, **keywords):
        global count
        if count == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return function(*arguments, **keywords)

    return wrapper


class CountedWriter(prepare_module.ArrayRecordWriter):
    """Dies between the rows of a shard, too."""

    write = counted(prepare_module.ArrayRecordWriter.write)
    close = counted(prepare_module.ArrayRecordWriter.close)


if __name__ == "__main__":
    tokenised.PART_BYTES, tokenised.CHUNK_BYTES = 4000, 1000
    prepare_module.SHARD_BYTES = 8000
    prepare_module.ArrayRecordWriter = CountedWriter
    os.fsync, Path.replace, Path.rename = counted(os.fsync), counted(Path.replace), counted(Path.rename)
    prepare_module.prepare(make_config(data__path=sys.argv[1], data__corpus=sys.argv[2]), report=lambda line: None)
    print(count)
