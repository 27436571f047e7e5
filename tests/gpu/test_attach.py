"""attach() on a GPU: what needs compiled kernels. The rest is tests/torch/test_attach.py, which
runs here too. Skipped, visibly, where there is no GPU."""

import gc
import os
import subprocess
import sys
import unittest

import ebbtide

try:
    ebbtide.probe()
    import torch
except (ebbtide.Error, ImportError) as error:
    raise unittest.SkipTest(f"no GPU, or no PyTorch: {error}") from None

MIB = 1 << 20


class UnderPyTorch(unittest.TestCase):
    def setUp(self):
        gc.collect()
        torch.cuda.empty_cache()
        ebbtide.attach(limit="2GiB", headroom=0)
        self.device = ebbtide.Device(0)
        self.vbar = ebbtide.VBAR(self.device, "2GiB")
        self.host = torch.ones(8 * MIB).pin_memory()
        self.weights = [self.vbar.alloc(self.host.nbytes) for _ in range(64)]
        self.use_weights()

    def use_weights(self):
        for w in self.weights:
            with w.resident(self.host) as t:
                self.assertEqual(float(t[-1]), 1.0)

    def tearDown(self):
        self.vbar.close()
        self.device.check()
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # PyTorch keeps them for good otherwise
        torch.cuda.empty_cache()
        self.device.close()
        self.assertEqual(ebbtide.detach(), 0)

    def test_convolutions_that_search_for_the_best_algorithm(self):
        torch.backends.cudnn.benchmark = True
        try:
            layer = torch.nn.Conv2d(64, 128, 3, padding=1).cuda()
            for size in (64, 96, 128):
                x = torch.randn(4, 64, size, size, device="cuda")
                layer(x).square().mean().backward()
        finally:
            torch.backends.cudnn.benchmark = False
        self.use_weights()

    def test_a_compiled_model(self):
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
        ).cuda()
        compiled = torch.compile(model)
        x = torch.randn(64, 256, device="cuda")
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
        self.use_weights()
        torch._dynamo.reset()

    def test_spawned_processes(self):
        code = (
            "import torch, ebbtide\n"
            "ebbtide.attach(limit='256MiB', headroom=0)\n"
            "x = torch.ones(1 << 20, device='cuda')\n"
            "assert float(x.sum()) == 1 << 20\n"
            "assert ebbtide.memory_stats()['segment_bytes'] > 0\n"
        )
        for _ in range(2):
            subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
        self.use_weights()

    def test_large_matmuls_beside_weights(self):
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(10):
            b = a @ a
            self.use_weights()
        self.assertTrue(bool(torch.isfinite(b).all()))
        self.assertLessEqual(self.device.stats()["held"], self.device.limit)


if __name__ == "__main__":
    unittest.main()
