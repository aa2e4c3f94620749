"""What ranks of the equality jobs share: imported once, in the process that they are forked from.

The environment is set before torch reads it: one thread, and nothing compiled, which a tiny model does not repay.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}

from megathunder.learner import cpu

cpu.import_megatron()  # as a learner's rank does

from tests.equality import adapter_publication, cells, layouts, parallel, parity, resharding  # noqa: F401
