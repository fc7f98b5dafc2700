# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine in a process of its own: `python engine.py REQUEST.json REPLY.json`.

The request: {"llm": arguments of vllm.LLM, "prompts": texts or lists of token ids,
"sampling": arguments of SamplingParams, "each": more of them for each prompt, or [], "routes":
bool}. The reply: for each prompt "tokens", "texts" and "logprobs" (of the prompt); what `probes.py`
found, with the "operators" of a short generation; if asked for, the "routes" of each rank, whose
calls are those of that generation.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(worker_extension_cls="probes.Probes", **request["llm"])
    try:
        seen = watch(llm, request)
        outputs = generate(llm, request["prompts"], request["sampling"], request["each"])
    finally:
        llm.llm_engine.engine_core.shutdown()
    return {
        **seen,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
        "logprobs": [prompt_logprobs(output) for output in outputs],
    }


def watch(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """A short generation with counting and profiling on; the real one then runs without."""
    seen: dict[str, Any] = {}
    if request["routes"]:
        llm.collective_rpc("vllm_fl_dispatch", args=("count",))
    llm.collective_rpc("probe_profile_start")
    prompts = request["prompts"] if request["each"] else request["prompts"][:1]
    generate(llm, prompts, {"temperature": 0.0, "max_tokens": 4}, request["each"])
    seen["operators"] = llm.collective_rpc("probe_profile_stop")[0]
    if request["routes"]:
        seen["routes"] = llm.collective_rpc("vllm_fl_dispatch", args=("uncount",))
    seen["layers"] = llm.collective_rpc("probe_layers")[0]
    seen["vllm"] = llm.collective_rpc("probe_vllm")[0]
    return seen


def generate(
    llm: Any, prompts: list[Any], sampling: dict[str, Any], each: list[dict[str, Any]]
) -> list[Any]:
    from vllm import SamplingParams

    # Without a tokenizer there is nothing to turn tokens into text with.
    detokenize = isinstance(prompts[0], str)
    inputs = prompts if detokenize else [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(**{"detokenize": detokenize, **sampling, **own})
        for own in each or [{}] * len(prompts)
    ]
    return llm.generate(inputs, params, use_tqdm=False)


def prompt_logprobs(output: Any) -> list[float]:
    """The log-probability of each token of the prompt but the first, if they were asked for."""
    if output.prompt_logprobs is None:
        return []
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [at_position[token].logprob for token, at_position in pairs]


if __name__ == "__main__":
    reply = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(reply))
