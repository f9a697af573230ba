"""`python -m flashllm` is `flashllm`."""

import sys

from flashllm.cli import main

sys.exit(main())
