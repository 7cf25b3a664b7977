"""Random-weight models of a few thousand parameters, one for each way of attending that Transformers has, and batches.

Tests are over `MODELS`, `cases_of` and `cuts_of`; `python -m benchmarks integrations` takes some of the models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as library
from torch import Tensor, nn

transformers: Any = library  # its configs take options that type checkers do not know

#: Batch rows, tokens (37 divides nothing), words.
ROWS, TOKENS, WORDS = 2, 37, 61
#: The id of an image's token.
IMAGE = 50
#: The first packed document of each row; a second one has the other tokens.
PACKED = (20, 9)
#: Padding of each row by the kind of batch: on the left, on the right.
PADDING = {"padded": ((0, 7), (5, 0)), "left padding": ((0, 0), (5, 0)), "right padding": ((0, 7), (0, 0))}

ENCODER = dict(
    vocab_size=WORDS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=128,
)
BASE = dict(**ENCODER, num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
WITHOUT_HEAD_DIM = {name: x for name, x in BASE.items() if name != "head_dim"}
ALTERNATING = ["sliding_attention", "full_attention"]
BERT_LIKE = dict(**ENCODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def _decoder(name: str, **more: Any) -> Callable[..., nn.Module]:
    """Return what makes a causal language model by the name of its classes."""

    def make(**options: Any) -> nn.Module:
        config = getattr(transformers, f"{name}Config", None) or getattr(transformers, f"{name}TextConfig")
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config(**{**BASE, **more, **options}))
        return model

    return make


def _gemma3_text(**options: Any) -> nn.Module:
    config = transformers.Gemma3TextConfig(**{**BASE, "sliding_window": 9, "layer_types": ALTERNATING, **options})
    return transformers.Gemma3ForCausalLM(config)


def _gemma3_images(**options: Any) -> nn.Module:
    text = {**BASE, "sliding_window": 9, "layer_types": ALTERNATING}
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE, **options
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _llama4(**options: Any) -> nn.Module:
    config = transformers.Llama4TextConfig(
        **{
            **BASE,
            "intermediate_size_mlp": 40,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 10,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "floor_scale": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **options,
        }
    )
    return transformers.Llama4ForCausalLM(config)


def _phi3_longrope(**options: Any) -> nn.Module:
    rope = dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0] * 4,
        long_factor=[4.0] * 4,
        original_max_position_embeddings=20,
    )
    config = transformers.Phi3Config(
        **{**WITHOUT_HEAD_DIM, "rope_parameters": rope, "original_max_position_embeddings": 20, **options}
    )
    return transformers.Phi3ForCausalLM(config)


def _phi(**options: Any) -> nn.Module:
    config = transformers.PhiConfig(**{**WITHOUT_HEAD_DIM, "partial_rotary_factor": 0.5, **options})
    return transformers.PhiForCausalLM(config)


def _deepseek_v3(**options: Any) -> nn.Module:
    config = transformers.DeepseekV3Config(
        **{
            **WITHOUT_HEAD_DIM,
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            **options,
        }
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt2(**options: Any) -> nn.Module:
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    sizes = dict(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **dropout, **options}))


def _opt(**options: Any) -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=WORDS,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        dropout=0.0,
        **options,
    )
    return transformers.OPTForCausalLM(config)


def _roberta_classifier(**options: Any) -> nn.Module:
    config = transformers.RobertaConfig(**{**BERT_LIKE, "pad_token_id": 1, "num_labels": 5, **options})
    return transformers.RobertaForSequenceClassification(config)


def _bert(**options: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**BERT_LIKE, **options}))


def _roberta(**options: Any) -> nn.Module:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**{**BERT_LIKE, "pad_token_id": 1, **options}))


def _modernbert(**options: Any) -> nn.Module:
    config = transformers.ModernBertConfig(
        **ENCODER,
        pad_token_id=0,
        global_attn_every_n_layers=2,
        local_attention=8,
        **options,
    )
    return transformers.ModernBertForMaskedLM(config)


def _vit(**options: Any) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=24,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return transformers.ViTForImageClassification(config)


def _whisper(**options: Any) -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=25,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        **options,
    )
    return transformers.WhisperForConditionalGeneration(config)


def _t5gemma(**options: Any) -> nn.Module:
    part = {
        **BASE,
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "layer_types": ALTERNATING,
        "query_pre_attn_scalar": 8,
    }
    config = transformers.T5GemmaConfig(encoder=part, decoder=dict(part), vocab_size=WORDS, dropout_rate=0.0, **options)
    return transformers.T5GemmaForConditionalGeneration(config)


def _qwen_vl(name: str) -> Callable[..., nn.Module]:
    """Return what makes a Qwen2-VL or Qwen2.5-VL, whose rotary embeddings have three axes."""

    def make(**options: Any) -> nn.Module:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        vision = dict(
            depth=2, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_channels=3
        ) | (
            dict(embed_dim=32, hidden_size=32, mlp_ratio=2)
            if name == "Qwen2VL"
            else dict(
                hidden_size=32, out_hidden_size=32, intermediate_size=48, window_size=8, fullatt_block_indexes=[1]
            )
        )
        config = getattr(transformers, f"{name}Config")(
            text_config={**BASE, "rope_parameters": rope},
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=51,
            vision_start_token_id=52,
            vision_end_token_id=53,
            **options,
        )
        model: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        return model

    return make


def _lfm2(**options: Any) -> nn.Module:
    config = transformers.Lfm2Config(**{**WITHOUT_HEAD_DIM, "layer_types": ["conv", "full_attention"], **options})
    return transformers.Lfm2ForCausalLM(config)


#: Name -> what makes the model; keyword arguments are options of its config.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": _decoder("Llama"),
    "qwen3": _decoder("Qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "gemma2": _decoder(
        "Gemma2",
        sliding_window=9,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=11,
    ),
    "gemma3": _gemma3_text,
    "gemma3 images": _gemma3_images,
    "mistral": _decoder("Mistral", sliding_window=9),
    "gpt-oss": _decoder(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=9,
        layer_types=ALTERNATING,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "cohere2": _decoder("Cohere2", sliding_window=9, layer_types=ALTERNATING),
    "llama4": _llama4,
    "phi": _phi,
    "phi3 longrope": _phi3_longrope,
    "deepseek-v3": _deepseek_v3,
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
    "roberta": _roberta,
    "roberta classifier": _roberta_classifier,
    "modernbert": _modernbert,
    "vit": _vit,
    "whisper": _whisper,
    "t5gemma": _t5gemma,
    "qwen2-vl": _qwen_vl("Qwen2VL"),
    "qwen2.5-vl": _qwen_vl("Qwen2_5_VL"),
}
#: Models that mix tokens by convolutions, which `context_parallel` refuses.
CONVOLUTIONS: dict[str, Callable[..., nn.Module]] = {"lfm2": _lfm2}
#: Models whose tokens are cut before their layers only.
LAYERS_ONLY = (
    "gemma3 images",
    "llama4",
    "gpt2",
    "opt",
    "roberta classifier",
    "bert",
    "roberta",
    "modernbert",
    "vit",
    "whisper",
    "t5gemma",
    "qwen2-vl",
    "qwen2.5-vl",
)
#: Models of images or audio.
OTHER_INPUTS = ("gemma3 images", "vit", "whisper", "qwen2-vl", "qwen2.5-vl")


def cases_of(name: str) -> list[str]:
    """Return the kinds of batches that a model is tested with."""
    if name in OTHER_INPUTS:
        return ["plain"]
    # packed: chunks are not supported inside documents, and frequencies of longrope depend on the longest document
    return (
        ["plain", "padded"]
        if name in ("t5gemma", "llama4", "opt", "roberta", "roberta classifier", "phi3 longrope")
        else ["plain", "padded", "packed"]
    )


def cuts_of(name: str) -> list[str]:
    """Return where a model's sequence is cut in tests."""
    return ["layers"] if name in LAYERS_ONLY else ["inputs", "layers"]


def build(name: str, dtype: torch.dtype, seed: int = 0, **options: Any) -> Any:
    """Return a model with random weights, in training mode."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = {**MODELS, **CONVOLUTIONS}[name](**options)
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    for config in configs.values():
        config._attn_implementation_internal = "eager"
        config._experts_implementation = "eager"  # grouped matrix products have no float64
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for path, p in sorted(model.named_parameters()):
            if "norm" not in path.lower() or p.ndim != 1 or "bias" in path:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.25 if p.ndim > 1 else 0.1))
    return model.to(dtype).train()


def batch_of(name: str, case: str, dtype: torch.dtype, tokens: int = TOKENS, seed: int = 5) -> dict[str, Tensor]:
    """Return a batch for a model: "plain", "packed", or padded as `PADDING` names it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, IMAGE, (ROWS, tokens), generator=generator)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    n = tokens // 3 - tokens % 2  # of a decoder: odd where the encoder's is
    short = dict(decoder_input_ids=ids[:, :n].contiguous(), labels=ids[:, 1 : n + 1].contiguous())
    if name == "vit":
        return dict(pixel_values=random(ROWS, 3, 24, 24), labels=torch.tensor([1, 2]))
    if name == "whisper":
        return dict(input_features=random(ROWS, 8, 50), **short)
    labels = ids.clone()
    labels[0, :9] = -100
    if name in OTHER_INPUTS:
        for row, first in enumerate((5, 20)):
            ids[row, first : first + 4] = IMAGE
        labels[ids == IMAGE] = -100
        batch = dict(input_ids=ids, labels=labels)
        if name == "gemma3 images":
            return batch | dict(pixel_values=random(ROWS, 3, 16, 16), token_type_ids=(ids == IMAGE).long())
        grid = torch.tensor([[1, 4, 4]] * ROWS)
        return batch | dict(
            pixel_values=random(ROWS * 16, 96), image_grid_thw=grid, mm_token_type_ids=(ids == IMAGE).long()
        )
    mask = torch.ones_like(ids)
    for row, (left, right) in enumerate(PADDING.get(case, ())):
        mask[row, :left] = mask[row, tokens - right :] = 0
    if name == "t5gemma":
        return dict(input_ids=ids, attention_mask=mask, **short)
    batch = dict(input_ids=ids, labels=labels)
    if case in PADDING:
        labels = labels.masked_fill(mask == 0, -100)
        labels[1, PADDING[case][1][0]] = -100  # padding would predict it
        batch |= dict(attention_mask=mask, labels=labels)
    if name == "roberta classifier":
        batch["labels"] = torch.tensor([1, 2])
    if case == "packed":
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n), torch.arange(tokens - n)]) for n in PACKED])
        labels[batch["position_ids"] == 0] = -100  # no document predicts the next one
    return batch


def documents_of(name: str, case: str, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the batches that one device computes one after another: packed documents each alone, else the batch."""
    if case != "packed":
        return [batch]
    cuts = [(row, slice(0, n)) for row, n in enumerate(PACKED)]
    cuts = [cut for row, own in cuts for cut in ((row, own), (row, slice(own.stop, None)))]
    return [{key: x[row : row + 1, own].contiguous() for key, x in batch.items()} for row, own in cuts]
