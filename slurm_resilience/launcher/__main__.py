"""`python -m slurm_resilience.launcher`."""

import sys

from slurm_resilience.launcher.main import main

sys.exit(main())
