"""`python -m patchkv_evals.device_check`; see `check`."""

import sys

from patchkv_evals.device_check.check import main

sys.exit(main())
