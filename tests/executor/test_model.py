"""What cannot be served is refused with one sentence; what can be is described rightly."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from swapserve.inspection import HeadRule, check_head
from swapserve.model import ModelError, ModelNotFound, UnsupportedModel, load_model

DEVICE = torch.device("cpu")


def test_facts_of_a_model_with_windows(model_folder):
    model = load_model(str(model_folder("gemma3")), device="cpu")
    assert [layer.window for layer in model.layers] == [8, 0, 8]
    assert {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in model.layers} == {(6, 2, 16)}
    assert (model.vocab_size, model.max_model_len, model.dtype) == (96, 256, torch.float32)
    assert model.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert model.eos_token_ids == frozenset()


def test_end_tokens_are_those_of_the_generation_config(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model(str(folder), device="cpu").eos_token_ids == {5, 7}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./no/such/folder", "there is no file or folder"),
        ("/no/such/file.gguf", "there is no file or folder"),
        ("what is this?", "there is no file or folder"),
    ],
)
def test_a_path_that_is_not_there(name, said):
    with pytest.raises(ModelNotFound, match=said) as caught:
        load_model(name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_a_model_and_a_file_that_is_none(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        load_model(str(tmp_path))
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(ModelNotFound, match="is no model"):
        load_model(str(file))


def test_a_folder_without_weights(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="could not be loaded") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_an_unknown_hub_name(monkeypatch):
    def absent(*args, **kwargs):
        raise OSError("we have no such model\nand much more to say")

    monkeypatch.setattr("swapserve.model.AutoConfig.from_pretrained", absent)
    with pytest.raises(ModelNotFound, match="Hugging Face hub did not give it") as caught:
        load_model("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_settings_that_do_not_exist(model_folder):
    folder = str(model_folder("llama"))
    with pytest.raises(ModelError, match="float32, bfloat16, float16"):
        load_model(folder, dtype="float64")
    with pytest.raises(ModelError, match="auto, cpu, cuda"):
        load_model(folder, device="abacus")
    with pytest.raises(ModelError, match=r"--max-model-len 257 is more than .* 256"):
        load_model(folder, max_model_len=257)
    with pytest.raises(ModelError, match="reference, cpu, triton"):
        load_model(folder, device="cpu", backend="abacus")
    assert load_model(folder, device="cpu", max_model_len=100).max_model_len == 100


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1), "attention interface"),
        (transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2), "attention interface"),
        (
            transformers.DeepseekV3Config(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_rope_head_dim=4,
                qk_nope_head_dim=4,
                v_head_dim=4,
                n_routed_experts=4,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
            ),
            "only one size for all three",
        ),
    ],
    ids=["mamba", "bloom", "deepseek"],
)
def test_architectures_that_cannot_be_served(config, said, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=said) as caught:
        load_model(str(tmp_path), device="cpu")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_that_does_more_than_is_known_is_refused(model_folder):
    model = load_model(str(model_folder("gemma2")), device="cpu")
    check_head(model.module, model.module.get_decoder(), model.head_rule, DEVICE)
    with pytest.raises(UnsupportedModel, match="logits"):
        check_head(model.module, model.module.get_decoder(), HeadRule(), DEVICE)


def test_transformers_builds_no_mask(model_folder, monkeypatch):
    model = load_model(str(model_folder("gemma2")), device="cpu")
    made = []
    from transformers import masking_utils

    for name in ("sdpa_mask", "eager_mask", "find_packed_sequence_indices"):
        monkeypatch.setattr(masking_utils, name, lambda *args, made=made, **kwargs: made.append(1))
    from swapserve.inspection import AttentionProbe, run_one_token

    run_one_token(model.module, DEVICE, AttentionProbe())
    assert made == []
