# SPDX-License-Identifier: Apache-2.0
"""Facts about each vendor's device, as data.

A value stands here because two independent sources agree on it, or the vendor's own code says it.
Where only one source does, or sources differ, the field is listed in `open` with what is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...dispatch.types import VendorInfo

__all__ = ["CPU", "DEVICES", "Marker", "VendorDevice"]


@dataclass(frozen=True, slots=True)
class Marker:
    """One thing by which a chip or its software is recognised, without importing anything.

    Attributes:
        kind: "node" (a pattern below /dev), "module" (installed), "torch" (a mark that a
            vendor's build of torch bears), "env" (a variable is set) or "tool" (on PATH).
        what: the pattern, module, mark, variable or tool.
    """

    kind: str
    what: str

    def __str__(self) -> str:
        return {
            "node": f"/dev/{self.what}",
            "module": f"module {self.what}",
            "torch": f"torch's mark {self.what}",
            "env": f"variable {self.what}",
            "tool": f"tool {self.what}",
        }[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorDevice(VendorInfo):
    """What is known of a vendor's chips.

    Attributes:
        dispatch_key: torch's dispatch key of their tensors.
        extension: the module that brings the device type to torch, or None: the vendor's own
            build of torch has it.
        markers: alternatives, of which one suffices; all markers of an alternative must be there.
        communication: the name of the torch.distributed backend.
        library: the library behind it.
        visible_devices: the variables that choose among the chips of a machine; the first is
            the one to set.
        tool: the command that lists the chips, or None.
        flaggems: what GEMS_VENDOR calls the vendor (FlagGems 5.0.2), or None: it does not know it.
        open: (field, what is known) of each value that is not confirmed.
    """

    dispatch_key: str
    extension: str | None = None
    markers: tuple[tuple[Marker, ...], ...] = ()
    communication: str = ""
    library: str = ""
    visible_devices: tuple[str, ...] = ()
    tool: str | None = None
    flaggems: str | None = None
    open: tuple[tuple[str, str], ...] = ()


def _node(pattern: str) -> Marker:
    return Marker("node", pattern)


def _module(name: str) -> Marker:
    return Marker("module", name)


def _torch(mark: str) -> Marker:
    return Marker("torch", mark)


def _tool(name: str) -> Marker:
    return Marker("tool", name)


CPU = VendorDevice(
    "cpu", "cpu", "vLLM's CPU kernels", dispatch_key="CPU", communication="gloo", library="Gloo"
)
"""What a machine is on which no vendor's chip is found."""

# Most particular first: what others imitate comes after those that imitate it. MetaX, Iluvatar,
# Hygon, T-Head and Kunlunxin all call their devices "cuda" and may offer NVIDIA's or AMD's nodes
# and tools beside their own. An extension module alone proves no chip, because it installs
# anywhere: it counts together with the tool that comes with the driver.
DEVICES: tuple[VendorDevice, ...] = (
    VendorDevice(
        "ascend", "npu", "Huawei Ascend",
        dispatch_key="PrivateUse1",
        extension="torch_npu",
        markers=((_node("davinci*"),),),
        communication="hccl", library="HCCL",
        visible_devices=("ASCEND_RT_VISIBLE_DEVICES",),
        tool="npu-smi",
        flaggems="ascend",
    ),
    VendorDevice(
        "metax", "cuda", "MetaX MACA",
        dispatch_key="CUDA",
        markers=((_node("mxcd"),), (_tool("mx-smi"),)),
        communication="nccl", library="MCCL",
        visible_devices=("CUDA_VISIBLE_DEVICES", "MACA_VISIBLE_DEVICES"),
        tool="mx-smi",
        flaggems="metax",
        open=(
            ("markers", "/dev/mxcd: one source; the tool: confirmed"),
            ("visible_devices", "one source says that both are honoured"),
        ),
    ),
    VendorDevice(
        "hygon", "cuda", "Hygon DCU",
        dispatch_key="CUDA",
        markers=((_node("mkfd"),), (_torch("__hcu_version__"),)),
        communication="nccl", library="RCCL of DTK",
        visible_devices=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        tool="hy-smi",
        flaggems="hygon",
        open=(
            ("markers", "/dev/mkfd: one source; torch's mark: confirmed"),
            ("library", "FlagCX lists DUCCL"),
            ("visible_devices", "FlagGems sets the first, Hygon's own plugin the second"),
        ),
    ),
    VendorDevice(
        "sunrise", "ptpu", "Sunrise PTPU",
        dispatch_key="PrivateUse1",
        extension="torch_ptpu",
        markers=((_node("tang*"),), (_module("torch_ptpu"), _tool("pt_smi"))),
        communication="pccl", library="PCCL",
        visible_devices=("TANG_VISIBLE_DEVICES",),
        tool="pt_smi",
        flaggems="sunrise",
        open=(
            ("dispatch_key", "one source (FlagGems)"),
            ("markers", "/dev/tang* and the tool: one source"),
            ("tool", "one source"),
        ),
    ),
    VendorDevice(
        "iluvatar", "cuda", "Iluvatar CoreX",
        dispatch_key="CUDA",
        markers=((_torch("corex"),), (_tool("ixsmi"),)),
        communication="nccl", library="IXCCL",
        visible_devices=("CUDA_VISIBLE_DEVICES", "ILUVATAR_VISIBLE_DEVICES"),
        tool="ixsmi",
        flaggems="iluvatar",
        open=(
            ("dispatch_key", "one source (FlagGems)"),
            ("markers", "torch's mark: one source (FlagGems); the tool: confirmed"),
            ("communication", "one source"),
            ("visible_devices", "the second is FlagGems'"),
        ),
    ),
    VendorDevice(
        "thead", "cuda", "T-Head PPU",
        dispatch_key="CUDA",
        markers=((Marker("env", "PPU_SDK"),), (_tool("ppu-smi"),)),
        communication="nccl", library="",
        visible_devices=("CUDA_VISIBLE_DEVICES",),
        tool="ppu-smi",
        flaggems=None,
        open=(
            ("dispatch_key", "no source says it; the device type is cuda"),
            ("markers", "the variable: confirmed; the tool: one source"),
            ("communication", "one source; the library is not known"),
            ("tool", "one source"),
            ("flaggems", "5.0.2 does not know it, later sources detect it by PPU_SDK"),
        ),
    ),
    VendorDevice(
        "kunlunxin", "cuda", "Kunlunxin",
        dispatch_key="CUDA",
        extension="torch_xmlir",
        markers=((_module("torch_xmlir"), _tool("xpu-smi")),),
        communication="nccl", library="XCCL (BKCL)",
        visible_devices=("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES"),
        tool="xpu-smi",
        flaggems="kunlunxin",
        open=(
            ("dispatch_key", "no source says it; the device type is cuda"),
            ("visible_devices", "the first on newer stacks, the second on older ones"),
            ("tool", "Intel's has the same name"),
        ),
    ),
    VendorDevice(
        "cambricon", "mlu", "Cambricon",
        dispatch_key="PrivateUse1",
        extension="torch_mlu",
        markers=((_module("torch_mlu"), _tool("cnmon")),),
        communication="cncl", library="CNCL",
        visible_devices=("MLU_VISIBLE_DEVICES",),
        tool="cnmon",
        flaggems="cambricon",
        open=(("dispatch_key", "FlagGems says PrivateUse1, Cambricon's own plugin MLU"),),
    ),
    VendorDevice(
        "mthreads", "musa", "Moore Threads",
        dispatch_key="MUSA",
        extension="torch_musa",
        markers=((_module("torch_musa"), _tool("mthreads-gmi")),),
        communication="mccl", library="MUSA's MCCL, which is not MetaX's",
        # MTHREADS_VISIBLE_DEVICES is read by the container runtime, not by a process.
        visible_devices=("MUSA_VISIBLE_DEVICES",),
        tool="mthreads-gmi",
        flaggems="mthreads",
        open=(("dispatch_key", "declared as MUSA; whether PrivateUse1 is underneath is open"),),
    ),
    VendorDevice(
        "enflame", "gcu", "Enflame GCU",
        dispatch_key="PrivateUse1",
        extension="torch_gcu",
        markers=((_module("torch_gcu"),),),
        communication="eccl", library="ECCL",
        visible_devices=("TOPS_VISIBLE_DEVICES",),
        tool=None,
        flaggems="enflame",
        open=(
            ("tool", "no source names one"),
            ("markers", "without a tool or node the module has to do"),
        ),
    ),
    VendorDevice(
        "tsingmicro", "txda", "Tsingmicro",
        dispatch_key="PrivateUse1",
        extension="torch_txda",
        markers=((_module("torch_txda"), _tool("tsm_smi")),),
        communication="tccl", library="TCCL",
        visible_devices=("TXDA_VISIBLE_DEVICES",),
        tool="tsm_smi",
        flaggems="tsingmicro",
        open=(("dispatch_key", "one source (FlagGems)"),),
    ),
    VendorDevice(
        "xpu", "xpu", "Intel",
        dispatch_key="XPU",
        # torch for XPU installs anywhere; its GPUs' nodes are those of every graphics card.
        markers=((_torch("xpu"), _tool("xpu-smi")),),
        communication="xccl", library="oneCCL",
        visible_devices=("ZE_AFFINITY_MASK",),
        tool="xpu-smi",
        flaggems=None,
        open=(
            ("tool", "one source; Kunlunxin's has the same name"),
            ("flaggems", "5.0.2 has no backend for it"),
        ),
    ),
    VendorDevice(
        "cuda", "cuda", "NVIDIA",
        dispatch_key="CUDA",
        markers=((_node("nvidia[0-9]*"),), (_torch("cuda"), _tool("nvidia-smi"))),
        communication="nccl", library="NCCL",
        visible_devices=("CUDA_VISIBLE_DEVICES",),
        tool="nvidia-smi",
        flaggems="nvidia",
    ),
    VendorDevice(
        "rocm", "cuda", "AMD ROCm",
        dispatch_key="CUDA",
        markers=((_node("kfd"),), (_torch("hip"), _tool("rocm-smi"))),
        communication="nccl", library="RCCL",
        # vLLM itself uses CUDA's.
        visible_devices=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        tool="rocm-smi",
        flaggems="amd",
    ),
)  # fmt: skip
"""The fourteen vendors, in the order in which a machine is asked for them."""
