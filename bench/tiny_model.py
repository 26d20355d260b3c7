"""A model of a few megabytes with random weights, and an adapter for it: a real vLLM starts it in the least time.

Its words mean nothing, but its distributions are peaked enough for the gateway's probes, and its tokenizer and chat
template are those of a real small model.
"""

from __future__ import annotations

import shutil
from pathlib import Path


def make_tiny(tokenizer_of: Path, model: Path, adapter: Path, *, seed: int = 0, context_tokens: int = 8192) -> None:
    """Write a two-layer Llama to `model`, with the tokenizer in `tokenizer_of`, and a LoRA of it to `adapter`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=context_tokens,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )
    torch.nn.init.normal_(made.lm_head.weight, std=0.3)  # log-probs that differ between temperatures
    tokenizer.save_pretrained(model)
    made.save_pretrained(model)
    get_peft_model(made, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).save_pretrained(
        adapter
    )
    for name in ("chat_template.jinja", "tokenizer.json"):
        if (tokenizer_of / name).exists():
            shutil.copyfile(tokenizer_of / name, model / name)
