"""Writes a tiny llama GGUF with a sentencepiece vocabulary, quantised where GGUF files are."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

LETTERS = "abcdefgh"
TOKENS = ["<unk>", "<s>", "</s>", "▁", *LETTERS, "ab", "▁a", "▁ab", "cd", "▁cd"]
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


def write_tiny_gguf(path: Path, add_bos: bool | None) -> Path:
    """`add_bos` is the file's add-BOS flag; None leaves it out."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * 4 + [-10.0 - i for i in range(len(TOKENS) - 4)])
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    _add_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(5)
    kv_width = HIDDEN // HEADS * KV_HEADS

    def matrix(name: str, rows: int, columns: int, quantised: bool = False) -> None:
        values = rng.normal(0, 0.25, (rows, columns)).astype(np.float32)
        if quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)

    matrix("token_embd.weight", len(TOKENS), HIDDEN)
    matrix("output.weight", len(TOKENS), HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        matrix(blk + "attn_q.weight", HIDDEN, HIDDEN, quantised=True)
        matrix(blk + "attn_k.weight", kv_width, HIDDEN, quantised=True)
        matrix(blk + "attn_v.weight", kv_width, HIDDEN, quantised=True)
        matrix(blk + "attn_output.weight", HIDDEN, HIDDEN, quantised=True)
        matrix(blk + "ffn_gate.weight", INTERMEDIATE, HIDDEN, quantised=True)
        matrix(blk + "ffn_up.weight", INTERMEDIATE, HIDDEN, quantised=True)
        matrix(blk + "ffn_down.weight", HIDDEN, INTERMEDIATE, quantised=True)
        writer.add_tensor(blk + "attn_norm.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor(blk + "ffn_norm.weight", np.ones(HIDDEN, np.float32))
