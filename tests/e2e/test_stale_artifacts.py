# SPDX-License-Identifier: Apache-2.0
"""vLLM looks its compiled artifacts up before it traces anything. On the emulated CUDA path, each
run must execute what it was asked to, whatever an earlier run left in the cache."""

import shutil
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

EMULATED_CUDA = Path(__file__).parent / "emulated_cuda"
KERNEL = """
from pathlib import Path
from vllm_fl.dispatch import BackendImplKind, BackendPriority, OpImpl
from vllm_fl.ops.normalization import RMS_NORM

FACTOR = {factor}
DATA = float((Path(__file__).parent / "factor.txt").read_text())


def rms_norm(x, weight, epsilon, variance_size=None):
    return RMS_NORM.reference(x, weight, epsilon, variance_size) * (FACTOR * DATA)


def register(registry):
    registry.register_impl(
        OpImpl(op_name="rms_norm", impl_id="vendor.wrong", kind=BackendImplKind.VENDOR,
               fn=rms_norm, vendor="wrong", priority=BackendPriority.REFERENCE)
    )
"""


class Vendor:
    """An installed package whose kernel multiplies by a factor: 0 is wrong, and seen at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write(source=1, data=1, version="1.0")

    def write(self, *, source: int, data: int, version: str) -> None:
        for old in self.folder.glob("*.dist-info"):
            shutil.rmtree(old)
        info = self.folder / f"vendor_wrong-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vendor-wrong\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text("[vllm_fl.plugin]\nwrong = vendor_wrong:register\n")
        (self.folder / "vendor_wrong.py").write_text(KERNEL.format(factor=source))
        (self.folder / "factor.txt").write_text(str(data))


class Machine:
    """One cache of compiled artifacts, and runs that share it."""

    def __init__(self, engine, cache: Path, vendor: Vendor) -> None:
        self.engine, self.cache, self.vendor = engine, cache, vendor
        self.runs = 0

    def tokens(self, **changes: str) -> list[list[int]]:
        self.runs += 1
        before = self.artifacts()
        reply = self.engine(
            "tiny",
            {
                "VLLM_CACHE_ROOT": str(self.cache),
                "PYTHONPATH": f"{EMULATED_CUDA}:{self.vendor.folder}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "RUN": str(self.runs),  # the same request again is another run
                **changes,
            },
            enforce_eager=False,
            max_tokens=16,
            compilation_config={"compile_sizes": []},
        )
        self.reused = not self.artifacts() - before
        return reply["tokens"]

    def graphs(self) -> str:
        """The code of every graph that was traced."""
        found = self.cache.rglob("computation_graph.py")
        return "\n".join(path.read_text() for path in found)

    def artifacts(self) -> set[str]:
        folder = self.cache / "torch_compile_cache" / "torch_aot_compile"
        return {path.name for path in folder.glob("*")}


WRONG = {"VLLM_FL_PER_OP": "rms_norm=vendor:wrong"}


def test_each_run_executes_what_it_was_asked_to(engine, tmp_path: Path) -> None:
    for name in ("vendor", "cache"):
        (tmp_path / name).mkdir()
    vendor = Vendor(tmp_path / "vendor")
    machine = Machine(engine, tmp_path / "cache", vendor)

    stock = machine.tokens(VLLM_PLUGINS="fl_emulated_cuda")
    assert machine.artifacts(), "the emulated path must leave ahead-of-time artifacts"
    assert len({token for tokens in stock for token in tokens}) > 10

    assert machine.tokens() == stock  # native: the same graph
    assert "torch.ops.vllm_fl" not in machine.graphs()
    assert machine.tokens(**WRONG) == stock  # dispatched, and the factor is still 1
    assert "torch.ops.vllm_fl.rms_norm.default(" in machine.graphs()

    vendor.write(source=0, data=1, version="1.0")  # the kernel's source
    wrong = machine.tokens(**WRONG)
    assert wrong != stock and not machine.reused

    assert machine.tokens() == stock  # the policy
    assert machine.tokens(VLLM_FL_ENABLED="0") == stock  # switched off
    assert machine.tokens(**WRONG) == wrong  # and on again
    assert machine.reused, "going back must find the earlier artifact"

    vendor.write(source=1, data=1, version="1.0")
    assert machine.tokens(**WRONG) == stock
    assert machine.reused
    vendor.write(source=1, data=0, version="1.1")  # the package's version, and what it ships
    assert machine.tokens(**WRONG) == wrong
    assert not machine.reused
