"""`python -m diffjax` is the `diffjax` command."""

import sys

from diffjax.cli import main

sys.exit(main())
