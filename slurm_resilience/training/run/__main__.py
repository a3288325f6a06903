"""`python -m slurm_resilience.training.run`."""

import sys

from slurm_resilience.training.run.main import main

sys.exit(main())
