"""What only a GPU can tell. Skipped, visibly, where there is none.

Written for unittest, which pytest runs too: the machine with the GPU may have no pytest.
"""

import subprocess
import sys
import unittest

import ebbtide

try:
    ebbtide.probe()
except ebbtide.Error as error:
    raise unittest.SkipTest(f"no GPU: {error}") from None


class TheDriver(unittest.TestCase):
    def test_the_gpu_is_described(self):
        found = ebbtide.probe()
        self.assertTrue(found.name)
        self.assertGreaterEqual(found.driver_version, 12000)
        self.assertGreaterEqual(found.device_count, 1)
        self.assertGreater(found.total_bytes, 1 << 30)
        self.assertGreaterEqual(found.granularity, 2 << 20)

    def test_a_gpu_that_is_not_there(self):
        with self.assertRaises(ebbtide.NoDevice):
            ebbtide.probe(index=ebbtide.probe().device_count)

    def test_probing_makes_no_context(self):
        # In a process of its own: a context of this one would hide one that a probe made.
        code = (
            "import ctypes, ebbtide\n"
            "cuda = ctypes.CDLL('libcuda.so.1')\n"
            "ebbtide.probe()\n"
            "flags, active, ref = ctypes.c_uint(), ctypes.c_int(7), ctypes.byref\n"
            "assert cuda.cuDevicePrimaryCtxGetState(0, ref(flags), ref(active)) == 0\n"
            "assert active.value == 0, active.value\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_probing_again_and_again_works(self):
        first = ebbtide.probe()
        for _ in range(20):
            self.assertEqual(ebbtide.probe(), first)

    def test_pytorch_starts_after_a_probe(self):
        code = (
            "import ebbtide, sys\n"
            "before = ebbtide.probe()\n"
            "try:\n    import torch\nexcept ImportError:\n    sys.exit(0)\n"
            "assert torch.cuda.get_device_name(0) == before.name\n"
            "assert torch.ones(4, device='cuda').sum().item() == 4\n"
            "assert ebbtide.probe() == before\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    unittest.main()
