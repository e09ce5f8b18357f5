"""A tiny HY V4 checkpoint with sane random weights: `python tiny_model.py FOLDER [--heads 8] [--mtp]`.

Real files (config, safetensors, tokenizer), so that every way of starting vLLM loads it the same way: in one process,
served over HTTP, split over two GPUs, with the MTP layer as a draft. vLLM's `load_format="dummy"` would do without
files, but its weights are +-1e-3 everywhere, norms included, and the logits of that are noise.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TOPK = 512
VOCAB = 2048
HIDDEN = 512
LAYERS = 5
INDEXERS = ("full", "full", "shared", "shared", "full")
EXPERTS, EXPERTS_PER_TOKEN = 8, 2
# The indexer's kernel takes 32 or 64 heads; the configuration's default of 16 fails at the first prefill.
INDEX_HEADS, INDEX_DIM = 64, 128
NOPE, ROPE, VALUE, LATENT, QUERY_LATENT = 128, 64, 128, 512, 256
INTERMEDIATE, EXPERT_INTERMEDIATE = 512, 256
CHANNELS = 4  # residual channels of the hyper-connections


def make_config(heads: int = 8, *, mtp: bool = False, topk: int = TOPK) -> dict[str, Any]:
    """config.json. 8 heads take vLLM's mixed batch, 32 its separate decode and prefill."""
    return {
        "architectures": ["HYV4ForCausalLM"],
        "model_type": "hy_v4",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 16384,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "q_lora_rank": QUERY_LATENT,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "layer_types": ["deepseek_sparse_attention"] * LAYERS,
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "index_topk": topk,
        "index_head_dim": INDEX_DIM,
        "index_n_heads": INDEX_HEADS,
        "indexer_types": list(INDEXERS),
        "learnable_sink": True,
        "gated_mla": True,
        "gating_type": "elementwise",
        "enable_ihc": True,
        "hc_mult": CHANNELS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_nextn_predict_layers": int(mtp),
    }


def make_weights(heads: int = 8, *, mtp: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """All tensors under their checkpoint names: unit norms, matrices of variance 1 / fan-in."""
    maker = _Maker(seed)
    maker.matrix("model.embed_tokens.weight", VOCAB, HIDDEN, gain=math.sqrt(HIDDEN))
    maker.matrix("lm_head.weight", VOCAB, HIDDEN)
    maker.ones("model.norm.weight", HIDDEN)
    maker.channels("model.hc_head.hc_head_", CHANNELS, scales=1)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        _attention(maker, prefix, heads, with_indexer=INDEXERS[layer] == "full")
        _mlp(maker, prefix, layer, dense=layer == 0)
        for part in ("attn", "mlp"):
            maker.channels(f"{prefix}hc_{part}_layer.hc_pre.hc_", 2 * CHANNELS, scales=2)
    if mtp:
        prefix = "model.mtp_layers.0."
        for name in ("enorm", "hnorm", "final_layernorm"):
            maker.ones(f"{prefix}{name}.weight", HIDDEN)
        maker.matrix(f"{prefix}eh_proj.weight", HIDDEN, 2 * HIDDEN)
        _attention(maker, prefix, heads, with_indexer=True)
        _mlp(maker, prefix, LAYERS, dense=False)
    return maker.tensors


class _Maker:
    """Random tensors that depend on the seed and their name alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 2**32 + zlib.crc32(name.encode()))
        return torch.randn(*shape, generator=generator)

    def matrix(
        self, name: str, rows: int, columns: int, *, gain: float = 1.0, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.tensors[name] = (self.normal(name, rows, columns) * gain / math.sqrt(columns)).to(dtype)

    def ones(self, name: str, size: int) -> None:
        self.tensors[name] = torch.ones(size, dtype=torch.bfloat16)

    def channels(self, prefix: str, rows: int, *, scales: int) -> None:
        """Gates of the hyper-connections, near the model's own initial values."""
        self.matrix(prefix + "fn", rows, CHANNELS * HIDDEN, dtype=torch.float32)
        self.tensors[prefix + "scale"] = torch.full((scales,), 0.1)
        base = torch.zeros(rows)
        base[:CHANNELS] = -math.log(CHANNELS - 1)
        self.tensors[prefix + "base"] = base


def _attention(maker: _Maker, prefix: str, heads: int, *, with_indexer: bool) -> None:
    maker.ones(f"{prefix}input_layernorm.weight", HIDDEN)
    maker.ones(f"{prefix}post_attention_layernorm.weight", HIDDEN)
    own = prefix + "self_attn."
    maker.matrix(f"{own}q_a_proj.weight", QUERY_LATENT, HIDDEN)
    maker.matrix(f"{own}kv_a_proj_with_mqa.weight", LATENT + ROPE, HIDDEN)
    maker.ones(f"{own}q_a_layernorm.weight", QUERY_LATENT)
    maker.ones(f"{own}kv_a_layernorm.weight", LATENT)
    maker.matrix(f"{own}q_b_proj.weight", heads * (NOPE + ROPE), QUERY_LATENT)
    maker.matrix(f"{own}kv_b_proj.weight", heads * (NOPE + VALUE), LATENT)
    # Averages over many values are small; this keeps attention's part of the hidden state of order one.
    maker.matrix(f"{own}o_proj.weight", HIDDEN, heads * VALUE, gain=4.0)
    maker.matrix(f"{own}linear_gate.weight", heads * VALUE, HIDDEN)
    maker.tensors[f"{own}learnable_sink_param"] = maker.normal(f"{own}learnable_sink_param", heads)
    if with_indexer:
        maker.matrix(f"{own}indexer.wq_b.weight", INDEX_HEADS * INDEX_DIM, QUERY_LATENT)
        maker.matrix(f"{own}indexer.wk.weight", INDEX_DIM, HIDDEN)
        maker.matrix(f"{own}indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
        maker.tensors[f"{own}indexer.k_norm.weight"] = torch.ones(INDEX_DIM)
        maker.tensors[f"{own}indexer.k_norm.bias"] = torch.zeros(INDEX_DIM)


def _mlp(maker: _Maker, prefix: str, layer: int, *, dense: bool) -> None:
    own = prefix + "mlp."
    if dense:
        _feed_forward(maker, own, INTERMEDIATE)
        return
    maker.matrix(f"{own}gate.weight", EXPERTS, HIDDEN, dtype=torch.float32)
    # Scores are in (0, 1), so this bias alone picks the experts, other ones in each layer. A router that picks by
    # score turns a difference in a last bit into another expert now and then, and logits could not be compared.
    bias = torch.zeros(EXPERTS)
    bias[[(2 * layer) % EXPERTS, (2 * layer + 1) % EXPERTS]] = 2.0
    maker.tensors[f"{own}gate.e_score_correction_bias"] = bias
    for expert in range(EXPERTS):
        _feed_forward(maker, f"{own}experts.{expert}.", EXPERT_INTERMEDIATE)
    _feed_forward(maker, f"{own}shared_experts.", EXPERT_INTERMEDIATE)


def _feed_forward(maker: _Maker, prefix: str, width: int) -> None:
    maker.matrix(f"{prefix}gate_proj.weight", width, HIDDEN)
    maker.matrix(f"{prefix}up_proj.weight", width, HIDDEN)
    maker.matrix(f"{prefix}down_proj.weight", HIDDEN, width)


def make_tokenizer() -> dict[str, Any]:
    """tokenizer.json of a word-level tokenizer: token n is the word `tn`. `vllm serve` wants one."""
    words = {"<s>": 0, "</s>": 1, "<pad>": 2} | {f"t{token}": token for token in range(3, VOCAB)}
    special = [
        {
            "id": words[word],
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for word in ("<s>", "</s>", "<pad>")
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"},
    }


def write_checkpoint(
    folder: Path, heads: int = 8, *, mtp: bool = False, topk: int = TOPK, seed: int = 0
) -> dict[str, Any]:
    """Writes a checkpoint that vLLM loads from its path; returns its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(heads, mtp=mtp, topk=topk)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "pad_token": "<pad>",
                "model_max_length": config["max_position_embeddings"],
            }
        )
    )
    save_file(make_weights(heads, mtp=mtp, seed=seed), folder / "model.safetensors", metadata={"format": "pt"})
    return config


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--topk", type=int, default=TOPK)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mtp", action="store_true", help="with one MTP layer")
    options = parser.parse_args()
    write_checkpoint(options.folder, options.heads, mtp=options.mtp, topk=options.topk, seed=options.seed)
    print(f"tiny HY V4 with {options.heads} heads in {options.folder}")
