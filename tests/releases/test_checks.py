# SPDX-License-Identifier: Apache-2.0
"""The checker notices what a release could do to what vllm_fl relies on."""

from typing import Any

import pytest

from vllm_fl.vllm_plugin.layers import serve

from .audit import audit, failures, report
from .checks import (
    Accepts,
    Check,
    Decorated,
    Does,
    Entry,
    Equals,
    FieldsAmong,
    Files,
    Has,
    HasKeys,
    InOrder,
    IsA,
    Kind,
    MentionedOnlyIn,
    NamesClass,
    OnlySince,
    Sets,
    Takes,
)
from .served import DispatchesTo, ForwardsTake, KeptBySubclasses, Known, Subclasses, own_forward
from .source import Source

TREE = {
    "vllm/__init__.py": """
MODULE_ATTRS = {"LLM": ".llm:LLM"}

def __getattr__(name):
    if name in MODULE_ATTRS:
        return load(MODULE_ATTRS[name])
""",
    "vllm/llm.py": """
class LLM:
    def __init__(self, model, *, eager=False, **kwargs):
        self.engine = Engine(EngineArgs(model=model, **kwargs))

    def chat(self, messages, sampling=None, use_tqdm=True):
        ...
""",
    "vllm/envs.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    DEBUG: bool = False

variables: dict = {"DEBUG": lambda: False}

def __getattr__(name):
    return variables[name]()

def factors():
    return {name: getter() for name, getter in variables.items()}
""",
    "vllm/_C.abi3.so": "",
    "vllm/config/__init__.py": "from .all import Config as Config, Mode\n",
    "vllm/config/all.py": """
class Mode(int):
    NONE = 0
    BACKEND = "vllm.ops.CustomOp"

class Config:
    mode: Mode
    fuse: bool = None
""",
    "vllm/ops.py": """
class CustomOp(Module):
    def __init__(self, enforce=False):
        super().__init__()
        self._enforce = enforce
        self._forward_method = self.dispatch_forward()

    def forward(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)

    def forward_native(self, *args, **kwargs):
        raise NotImplementedError

    def forward_cuda(self, *args, **kwargs):
        return self.forward_native(*args, **kwargs)

    def dispatch_forward(self):
        if not self.enabled():
            return self.maybe_compile(self.forward_native)
        return self.forward_cuda

@CustomOp.register("rms_norm")
class RMSNorm(CustomOp):
    def __init__(self, size):
        super().__init__()
        self.size, self.eps = size, 1e-6
        self.register_buffer("weight", ones(size))

    def forward_native(self, x, residual=None):
        return ops.rms_norm(x, self.weight)
""",
    "vllm/norms.py": """
from vllm.ops import RMSNorm as Norm

class Mixin(Module):
    def forward(self, x, residual=None):
        return super().forward(x, residual)

class TPNorm(Mixin, Norm):
    pass

class GroupNorm(Norm):
    def forward(self, x):
        return x

class GroupNorm2(GroupNorm):
    pass

try:
    import extra
    class CastNorm(Norm):
        @staticmethod
        def forward_cuda(x, residual=None):
            return x
except ImportError:
    CastNorm = None
""",
    "vllm/worker.py": """
class Wrapper:
    def init_device(self):
        self.worker.init_device()

class RayWrapper(Wrapper):
    pass

def start(worker):
    worker.init_device()
    worker.load_model()
""",
}

NORMS = (
    Known("vllm.norms:TPNorm"),
    Known("vllm.norms:GroupNorm", "own forward"),
    Known("vllm.norms:GroupNorm2", "own forward"),
    Known("vllm.norms:CastNorm", "own forward_cuda"),
)

KEPT_INIT = (
    "    def __init__(self):\n        super().__init__()\n        self._forward_method = None\n"
)


def look(path: str, *checks: Check, tree: dict[str, str] = TREE, **more: Any) -> tuple[str, str]:
    finding = Entry(path, "a test", checks, **more).look(Source.of_texts("0.30.0", tree))
    return finding.status, finding.text


# Path, check, the file, what is planted there, and what the checker says then.
FAULTS: dict[str, tuple[str, Check | None, str, tuple[str, str], tuple[str, str]]] = {
    "a renamed method": (
        "vllm.llm:LLM.chat",
        None,
        "vllm/llm.py",
        ("def chat(", "def ask("),
        ("missing", "not there"),
    ),
    "a lazy name that is gone": (
        "vllm:LLM",
        Kind("class"),
        "vllm/__init__.py",
        ('"LLM": ".llm:LLM"', ""),
        ("missing", "not there"),
    ),
    "a moved class": (
        "vllm.config:Config.mode",
        Kind("value"),
        "vllm/config/__init__.py",
        ("Config as Config, ", ""),
        ("missing", "not there"),
    ),
    "a class that became a function": (
        "vllm:LLM",
        Kind("class"),
        "vllm/llm.py",
        ("class LLM:", "def LLM():"),
        ("changed", "a FunctionDef, expected a class"),
    ),
    "a missing parameter": (
        "vllm:LLM.chat",
        Accepts(("messages", "sampling", "use_tqdm"), first=2),
        "vllm/llm.py",
        (", use_tqdm=True", ""),
        ("changed", "no parameter use_tqdm: (messages, sampling=None)"),
    ),
    "parameters in another order": (
        "vllm:LLM.chat",
        Accepts(("messages", "sampling", "use_tqdm"), first=2),
        "vllm/llm.py",
        ("sampling=None, use_tqdm=True", "use_tqdm=True, sampling=None"),
        ("changed", "begins with (messages, use_tqdm)"),
    ),
    "one more parameter without a default": (
        "vllm:LLM.chat",
        Accepts(("messages",), first=1),
        "vllm/llm.py",
        ("sampling=None", "sampling"),
        ("changed", "also needs sampling: (messages, sampling, use_tqdm=True)"),
    ),
    "arguments that are no longer passed on": (
        "vllm:LLM.__init__",
        Accepts(("model", "eager"), rest="EngineArgs"),
        "vllm/llm.py",
        ("model=model, **kwargs", "model=model"),
        ("changed", "gives no further arguments to EngineArgs"),
    ),
    "another default": (
        "vllm.ops:RMSNorm.forward_native",
        Takes("x, residual=None"),
        "vllm/ops.py",
        ("x, residual=None", "x, residual=0"),
        ("changed", "(x, residual=0)"),
    ),
    "a forward that takes more": (
        "vllm.ops:RMSNorm",
        ForwardsTake("x, residual=None"),
        "vllm/ops.py",
        ("x, residual=None", "x, residual=None, scale=1"),
        ("changed", "forward_native(x, residual=None, scale=1)"),
    ),
    "an attribute that is not set any more": (
        "vllm.ops:RMSNorm.__init__",
        Sets(("size", "eps", "weight")),
        "vllm/ops.py",
        ('register_buffer("weight"', 'register_buffer("scale"'),
        ("missing", "does not set weight"),
    ),
    "a field that is gone": (
        "vllm.config:Config",
        Has(("mode", "fuse")),
        "vllm/config/all.py",
        ("    fuse: bool = None\n", ""),
        ("missing", "no fuse"),
    ),
    "a field that is new": (
        "vllm.config:Config",
        FieldsAmong(("mode", "fuse")),
        "vllm/config/all.py",
        ("fuse: bool = None", "fuse: bool = None\n    fuse_all: bool = None"),
        ("changed", "new: fuse_all"),
    ),
    "another value": (
        "vllm.config:Mode.NONE",
        Equals(0),
        "vllm/config/all.py",
        ("NONE = 0", "NONE = 1"),
        ("changed", "1"),
    ),
    "a class that its path does not lead to": (
        "vllm.config:Mode.BACKEND",
        NamesClass(),
        "vllm/ops.py",
        ("class CustomOp(Module)", "class Op(Module)"),
        ("changed", "vllm.ops.CustomOp"),
    ),
    "a variable that is gone": (
        "vllm.envs:variables",
        HasKeys(("DEBUG",)),
        "vllm/envs.py",
        ('"DEBUG"', '"TRACE"'),
        ("missing", "no DEBUG"),
    ),
    "a variable that the module does not give any more": (
        "vllm.envs:DEBUG",
        None,
        "vllm/envs.py",
        ('"DEBUG"', '"TRACE"'),
        ("missing", "not there"),
    ),
    "code that is gone": (
        "vllm.ops:CustomOp.forward",
        Does("self._forward_method(*args, **kwargs)"),
        "vllm/ops.py",
        ("return self._forward_method(", "return self._chosen("),
        ("changed", "nowhere in it: self._forward_method(*args, **kwargs)"),
    ),
    "another order": (
        "vllm.worker:start",
        InOrder(("worker.init_device()", "worker.load_model()")),
        "vllm/worker.py",
        ("    worker.init_device()\n    worker.load_model()",
         "    worker.load_model()\n    worker.init_device()"),
        ("changed", "worker.init_device() then worker.load_model()"),
    ),
    "another base class": (
        "vllm.ops:RMSNorm",
        IsA("vllm.ops:CustomOp"),
        "vllm/ops.py",
        ("class RMSNorm(CustomOp)", "class RMSNorm(Module)"),
        ("changed", "inherits CustomOp"),
    ),
    "another name in the registry": (
        "vllm.ops:RMSNorm",
        Decorated("CustomOp.register('rms_norm')"),
        "vllm/ops.py",
        ('"rms_norm"', '"norm"'),
        ("changed", "@CustomOp.register('norm')"),
    ),
    "a forward that vllm_fl does not know": (
        "vllm.ops:CustomOp.dispatch_forward",
        DispatchesTo(("cuda", "native")),
        "vllm/ops.py",
        ("return self.forward_cuda\n", "return self.forward_npu\n"),
        ("changed", "returns forward_npu"),
    ),
    "something else than a forward": (
        "vllm.ops:CustomOp.dispatch_forward",
        DispatchesTo(("cuda", "native")),
        "vllm/ops.py",
        ("return self.forward_cuda\n", "return make()\n"),
        ("changed", "returns make()"),
    ),
    "a method that is overridden": (
        "vllm.worker:Wrapper.init_device",
        KeptBySubclasses(),
        "vllm/worker.py",
        ("    pass", "    def init_device(self): ..."),
        ("changed", "vllm.worker:RayWrapper overrides it"),
    ),
    "one more user of an attribute": (
        "vllm.ops:CustomOp",
        MentionedOnlyIn("_forward_method", ("vllm/ops.py",)),
        "vllm/worker.py",
        ("def start(", "def swap(op):\n    op._forward_method = None\n\ndef start("),
        ("changed", "_forward_method stands in vllm/worker.py too"),
    ),
    "an extension under another name": (
        "vllm",
        Files("_C*.so"),
        "vllm/_C.abi3.so",
        ("", ""),
        ("missing", "no _C*.so"),
    ),
    "a new subclass": (
        "vllm.ops:RMSNorm",
        Subclasses(NORMS),
        "vllm/worker.py",
        ("class Wrapper:", "import vllm.ops as o\nclass NewNorm(o.RMSNorm): ...\n\nclass Wrapper:"),
        ("changed", "new: vllm.worker:NewNorm (served)"),
    ),
    "a subclass that is gone": (
        "vllm.ops:RMSNorm",
        Subclasses(NORMS),
        "vllm/norms.py",
        ("class GroupNorm2(GroupNorm)", "class GroupNorm2(Module)"),
        ("changed", "not there: vllm.norms:GroupNorm2"),
    ),
    "a subclass that got a forward of its own": (
        "vllm.ops:RMSNorm",
        Subclasses(NORMS),
        "vllm/norms.py",
        ("    pass\n\nclass GroupNorm(", "    def forward_native(self): ...\n\nclass GroupNorm("),
        ("changed", "vllm.norms:TPNorm: own forward_native, expected served"),
    ),
    "a subclass that sets what was read already": (
        "vllm.ops:RMSNorm",
        Subclasses(NORMS),
        "vllm/norms.py",
        ("    pass\n\nclass GroupNorm(", f"{KEPT_INIT}\nclass GroupNorm("),
        ("changed", "vllm.norms:TPNorm sets _forward_method after its base's __init__"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str) -> None:
    path, check, file, (old, new), expected = FAULTS[fault]
    checks = () if check is None else (check,)
    assert look(path, *checks)[0] == "ok", "before it is planted"
    assert old in TREE[file]
    tree = {**TREE, file: TREE[file].replace(old, new)}
    if file.endswith(".so"):
        tree["vllm/_core.abi3.so"] = tree.pop(file)
    assert look(path, *checks, tree=tree) == expected


def test_what_a_release_need_not_have_may_be_absent() -> None:
    gone = "vllm.llm:LLM.later"
    assert look(gone) == ("missing", "not there")
    assert look(gone, since="0.30.0") == ("missing", "not there")
    assert look(gone, since="0.32.0") == ("absent", "")
    assert look(gone, gone="0.30.0") == ("absent", "")
    assert look(gone, gone="0.32.0") == ("missing", "not there")
    assert look("vllm.llm:LLM.chat", Takes("x"), since="0.32.0")[0] == "changed"


def test_what_stood_under_a_name_before_is_not_asked_about() -> None:
    chat = "vllm.llm:LLM.chat"  # of 0.30.0, and without the parameter
    assert look(chat, OnlySince("0.32.0", Takes("x"), "another one")) == ("ok", "another one")
    assert look(chat, OnlySince("0.30.0", Takes("x"), "another one"))[0] == "changed"


def test_a_finding_says_where_it_was_found() -> None:
    source = Source.of_texts("0.30.0", TREE)
    entry = Entry("vllm:LLM.chat", "a test", (Takes("x"),))
    assert failures(source, [entry]) == [
        "vllm:LLM.chat: changed: (messages, sampling=None, use_tqdm=True) (vllm/llm.py:6)"
    ]


def test_the_table_shows_a_release_a_column_and_what_differs() -> None:
    entries = [
        Entry("vllm.envs:factors", "a test", (Takes(""),)),
        Entry("vllm.envs:DEBUG", "a test", since="0.31.0"),
        Entry("vllm.config:Mode.NONE", "a test", (Equals(0),)),
    ]
    other = {**TREE, "vllm/config/all.py": "class Mode:\n    NONE = 7\nclass Config: ...\n"}
    other["vllm/envs.py"] = other["vllm/envs.py"].replace('"DEBUG"', '"TRACE"')
    findings = {
        "0.30.0": audit(Source.of_texts("0.30.0", other), entries),
        "0.32.0": audit(Source.of_texts("0.32.0", TREE), entries),
    }
    assert (
        "\n".join(report(findings, entries))
        == """
vllm.envs       0.30.0   0.32.0
  factors           ok       ok
      ()
  DEBUG              -       ok

vllm.config     0.30.0   0.32.0
  Mode.NONE    changed       ok
      0.30.0: 7 (vllm/config/all.py:2)
      0.32.0: 0"""
    )


def test_the_rule_about_subclasses_is_that_of_the_plugin() -> None:
    text = TREE["vllm/ops.py"] + TREE["vllm/norms.py"]
    text = text.replace('@CustomOp.register("rms_norm")\n', "").replace("import extra", "pass")
    text = text.replace("from vllm.ops import RMSNorm as Norm", "Norm = RMSNorm")
    classes: dict[str, Any] = {"Module": type("Module", (), {}), "__name__": "vllm"}
    exec(text, classes)
    source = Source.of_texts("0.30.0", TREE)
    found = {path: source.find(path) for path in ("vllm.ops:RMSNorm", *(k.path for k in NORMS))}
    for base in found.values():
        for cls in found.values():
            assert base is not None and cls is not None
            reason = serve._own_forward(classes[cls.name], classes[base.name]) or "served"
            words = reason.replace("has its own", "own").replace("is no", "no").split(" ", 1)[-1]
            assert own_forward(source, cls, base) == words, (cls.name, base.name)
