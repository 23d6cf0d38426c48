"""Nothing rests on Pallas's Triton backend, which is to be removed.

That no lowered program does is checked wherever one is lowered, in `support.lower_for_cuda`.
"""

import re

from tests.pallas_kernels.support import CHECKOUT

TRITON = re.compile(r"pallas(\.triton|\s+import\s+.*\btriton\b)")


def test_no_module_imports_it():
    folders = ("pallas_kernels", "dms_jax", "experiments", "tests", "colab")
    sources = [path for folder in folders for path in (CHECKOUT / folder).rglob("*.py")]
    assert len(sources) > 300
    assert [path.name for path in sources if TRITON.search(path.read_text())] == []
    assert TRITON.search("from jax.experimental.pallas " + "import triton as plt")
