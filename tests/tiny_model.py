"""Writes tiny Hugging Face directories: a random Llama for whole-system tests, and tokenizers for tests of text.

The same seed gives the same files. Only `write_tiny_model` needs torch.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = "<|im_end|>"
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As many as the corpus below gives merges for: the model then has no token that is no text.
VOCAB_SIZE = 480
_CORPUS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "A line of riders: one pulls hard at the front, and the next carries on in the draft.",
    "def add(first: int, second: int) -> int:\n    return first + second\n",
    "Once upon a time there was a small model that answered every question with a random word.",
    "Questions, answers; numbers 0 1 2 3 4 5 6 7 8 9 and the words system, user, assistant.",
    "Größe, naïve café, Привет мир, 你好世界, こんにちは, 🙂🚴",
)
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Ten times the usual: the logits of a random model stand apart, so that rounding does not change the best.
    "initializer_range": 0.2,
}


def write_tiny_tokenizer(directory: Path) -> Path:
    """A byte-level BPE tokenizer with a ChatML template, and the config of the tiny model, without weights."""
    _write_tokenizer(directory, byte_level_tokenizer(), CHAT_TEMPLATE)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", **_LLAMA}
    _write_json(directory / "config.json", config)
    generation = {name: _LLAMA[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", generation)
    return directory


def write_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """The same with random weights in fp32 safetensors: 2 layers, 64 wide, 4 heads, 2 KV heads."""
    import torch  # noqa: PLC0415 - the fake runner's tests do without
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**_LLAMA)).save_pretrained(directory)
    return write_tiny_tokenizer(directory)


def write_byte_fallback_tokenizer(directory: Path) -> Path:
    """A tokenizer in the manner of SentencePiece: `▁` for a space, byte tokens for what it lacks; no chat template."""
    _write_tokenizer(directory, byte_fallback_tokenizer(), None)
    return directory


def byte_level_tokenizer() -> Tokenizer:
    """Any text in at most as many tokens as bytes; the special tokens are 0 to 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Words with `▁`, merges of letters, and 256 byte tokens; a leading space is added, and stripped again."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ("▁", *"abcdefghijklmnopqrstuvwxyzH<>/é", "▁a", "▁t", "▁th", "▁the", "▁▁", "er", "�"):
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "a"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("e", "r")]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")]
    )
    return tokenizer


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, chat_template: str | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048}
    if chat_template is not None:
        config |= {"bos_token": SPECIAL_TOKENS[0], "eos_token": EOS_TOKEN, "pad_token": SPECIAL_TOKENS[0]}
        (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
