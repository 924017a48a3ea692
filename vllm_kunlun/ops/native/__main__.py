"""``python -m vllm_kunlun.ops.native`` builds the host kernels."""

import sys

from vllm_kunlun.ops.native.build import main

sys.exit(main())
