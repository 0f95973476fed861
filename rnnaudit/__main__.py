"""``python -m rnnaudit`` is the program."""

import sys

from rnnaudit.cli.app import main

sys.exit(main())
