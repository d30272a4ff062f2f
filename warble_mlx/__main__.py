"""`python -m warble_mlx`: the same as the command `warble`."""

import sys

from warble_mlx.cli import main

sys.exit(main())
