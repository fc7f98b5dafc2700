# SPDX-License-Identifier: Apache-2.0
"""The audit tells which modules are recognised, and notices a new one and one that is gone."""

from vllm_fl.vllm_plugin.fusions.forms import QK_NORM_ROPE

from .forms import OfForm, Recognised, recognised
from .source import Source

OTHER = "def forward(self, x):\n    return x.split([1, 2])\n"


def release(**forwards: str) -> Source:
    """A vLLM with a module `vllm.<name>` for each, which holds a class Attention."""
    texts = {"vllm/__init__.py": ""}
    for name, forward in forwards.items():
        body = "".join(f"    {line}\n" for line in forward.strip().splitlines())
        texts[f"vllm/{name}.py"] = f"class Attention:\n{body}"
    return Source.of_texts("0.32.0", texts)


def finding(source: Source, *known: Recognised):
    found = source.find("vllm")
    assert found is not None
    return OfForm(known).look(source, found)


def test_every_form_is_found_in_a_release_and_others_are_not() -> None:
    one, other = QK_NORM_ROPE
    source = release(a=one, b=other, c=OTHER, d=one.replace("self.k_norm", "self.q_norm"))
    assert list(recognised(source)) == ["vllm.a:Attention", "vllm.b:Attention"]


def test_names_comments_and_annotations_make_no_difference() -> None:
    text = QK_NORM_ROPE[0].replace("q_by_head", "x").replace("self.rotary_emb", "self.rope")
    text = text.replace("self, positions, hidden_states", "self, positions: int, hidden_states: T")
    text = text.replace(
        "    qkv, _", '    """Said in words."""\n    # and in a comment\n    qkv, _', 1
    )
    assert list(recognised(release(a=text))) == ["vllm.a:Attention"]


def test_a_class_that_is_new_gone_or_too_early_is_noticed() -> None:
    source = release(a=QK_NORM_ROPE[0])
    assert finding(source, Recognised("vllm.a:Attention")).status == "ok"
    new = finding(source)
    assert (new.status, new.text) == ("changed", "new: vllm.a:Attention")
    gone = finding(source, Recognised("vllm.a:Attention"), Recognised("vllm.b:Attention"))
    assert gone.text == "not recognised any more: vllm.b:Attention"
    late = finding(source, Recognised("vllm.a:Attention", since="0.33.0"))
    assert late.text == "new: vllm.a:Attention"
