"""Prompts to token ids and back: the chat template and the tokenizer, once, here, for the whole system.

It knows a Hugging Face directory and nothing about models or workers.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2

from paceline.core.errors import BadPromptError, ConfigError
from paceline.core.request import ChatMessage, Prompt
from paceline.runtime.wire import ROLES
from router.token_bytes import TextDecoder, TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Words, spaces, several scripts, a character of four bytes: enough to see whether we read the decoder right.
_SAMPLE = "Hello, world! It's  1 + 1 = 2.\n\tÇa va? 你好 🙂 don't"

# Tokenised in a few hundred microseconds, and a thread that wants the interpreter waits up to five milliseconds for it.
_SHORT_CHARS = 512


def keep_torch_out() -> None:
    """Makes torch invisible to this process. For one that only tokenises, before it loads a tokenizer.

    transformers imports torch where it finds it, which costs a second and 190 MB and is good for nothing here.
    """
    hidden: Any = None  # for the import system, None means "there is no such module"
    sys.modules.setdefault("torch", hidden)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that it found no torch


class Tokenizer:
    """The tokenizer and chat template of one model directory.

    Text is tokenised as it stands: `<|im_end|>` in it is the special token, as a hand-written prompt wants it. In
    the content of a chat message the same letters are only letters: nobody's content can end its turn and forge
    another. Control tokens of a chat come from the template alone.

    `encode` waits for another thread that encodes; `aencode` is how a server calls it.
    """

    def __init__(self, directory: Path) -> None:
        self._tokenizer = _load(directory)
        tokens = {token_id: token for token, token_id in self._tokenizer.get_vocab().items()}
        added = self._tokenizer.added_tokens_decoder
        special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token_bytes = TokenBytes(tokens, special_ids, self._tokenizer.backend_tokenizer.decoder)
        self.vocab_size = max(tokens) + 1
        # The library's tokenizer changes its own state while it encodes: one prompt at a time.
        self._in_use = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._require_same_text()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a prompt, never empty. Raises BadPromptError, which never shows the prompt."""
        with self._in_use:
            return self._encode(prompt)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not prompt:
            raise BadPromptError("the prompt is empty")
        if isinstance(prompt, str):
            return _not_empty(self._tokenizer.encode(prompt, verbose=False))
        ids = tuple(part for part in prompt if isinstance(part, int))
        messages = tuple(part for part in prompt if isinstance(part, ChatMessage))
        return self._encode_chat(messages) if messages else self._check_ids(ids)

    async def aencode(self, prompt: Prompt) -> tuple[int, ...]:
        """`encode`, off the event loop, unless the prompt is so short that the way to the thread and back takes longer."""
        if _is_short(prompt) and self._in_use.acquire(blocking=False):
            try:
                return self._encode(prompt)
            finally:
                self._in_use.release()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.encode, prompt)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens; special tokens are left out, and bytes that are no character become U+FFFD."""
        decoder = TextDecoder(self.token_bytes)
        return "".join([decoder.push(token_id) for token_id in token_ids]) + decoder.flush()

    def close(self) -> None:
        """Ends the thread; what waits for it is cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        unknown = next((token_id for token_id in ids if not 0 <= token_id < self.vocab_size), None)
        if unknown is not None:
            raise BadPromptError(f"token id {unknown} is unknown: the last one is {self.vocab_size - 1}")
        return ids

    def _encode_chat(self, messages: tuple[ChatMessage, ...]) -> tuple[int, ...]:
        _check_roles(messages)
        if not self._tokenizer.chat_template:
            raise BadPromptError("the model has no chat template; send text instead of a chat")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return _not_empty(self._apply_template(conversation))
        # `from None`: the library's own words may quote the prompt, and a traceback would carry them into a log.
        except jinja2.TemplateError as error:
            raise BadPromptError(f"the chat template refuses this chat: {self._why(error)}") from None
        except ValueError:
            raise BadPromptError("the chat holds a control token that cannot be taken as text") from None

    def _apply_template(self, conversation: list[dict[str, str]]) -> list[int]:
        ids = self._tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
        )
        return cast("list[int]", ids)

    def _why(self, error: jinja2.TemplateError) -> str:
        """The template's own words; only where they stand in the template, since they could quote the prompt."""
        text = error.message or ""
        known = text and text in str(self._tokenizer.chat_template)
        return text if known else "see the model's documentation"

    def _require_same_text(self) -> None:
        ids = self._tokenizer.encode(_SAMPLE, verbose=False)
        if self.decode(ids) != self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True):
            raise ConfigError("this tokenizer's text cannot be made token by token; use another model")


def _load(directory: Path) -> "PreTrainedTokenizerFast":
    """Local files only, and no code out of the directory."""
    if not directory.is_dir():
        raise ConfigError(f"there is no model directory {directory}")
    from transformers import AutoTokenizer  # noqa: PLC0415 - it takes a second, and must come after keep_torch_out

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"cannot load the tokenizer in {directory}: {why}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer in {directory} has no tokenizer.json, which Paceline needs")
    # How long a prompt may be workers say. Past its own number the library would speak, in lines that are none of our log's.
    tokenizer.model_max_length = sys.maxsize
    return cast("PreTrainedTokenizerFast", tokenizer)


def _is_short(prompt: Prompt) -> bool:
    """Characters of text or of a chat, or token ids, which are only looked at."""
    if isinstance(prompt, str) or len(prompt) > _SHORT_CHARS:
        return len(prompt) <= _SHORT_CHARS
    return sum(len(part.content) if isinstance(part, ChatMessage) else 1 for part in prompt) <= _SHORT_CHARS


def _check_roles(messages: tuple[ChatMessage, ...]) -> None:
    unknown = next((message.role for message in messages if message.role not in ROLES), None)
    if unknown is not None:
        raise BadPromptError(f"unknown role {unknown[:32]!r}; known: {', '.join(ROLES)}")


def _not_empty(ids: Iterable[int]) -> tuple[int, ...]:
    known = tuple(ids)
    if not known:
        raise BadPromptError("the prompt gives no token")
    return known
