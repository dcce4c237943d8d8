"""The tokenizer and chat template of a model folder, as `rendering` wants them. Imports transformers when it is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from selfplay.agent import Message
from selfplay.errors import EngineError
from selfplay.policy.rendering import ChatError, find_stop_ids


class HfChat:
    """`rendering.ChatTokenizer` over a local Hugging Face folder. Nothing is fetched and no code of the folder is run.

    Raises `EngineError` for a folder without a usable tokenizer or chat template.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as e:
            raise EngineError(f"model folder {folder} has no tokenizer that can be loaded: {e}") from e
        if not self._tokenizer.chat_template:
            raise EngineError(f"model folder {folder} has no chat template: use a chat (instruct) model")
        tokenizer, added = self._tokenizer, self._tokenizer.added_tokens_decoder
        self.control: Mapping[str, int] = {t.content: i for i, t in added.items() if t.content}
        special = set(tokenizer.all_special_tokens)
        self.hidden: Collection[str] = frozenset(
            t.content for t in added.values() if t.content and (t.special or t.content in special)
        )
        self.vocab_size: int = len(tokenizer)
        eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.stop_ids: tuple[int, ...] = ()
        self.stop_ids = find_stop_ids(self, eos)
        if not self.stop_ids:
            raise EngineError(f"model folder {folder} has neither an end token nor one in its chat template")

    def template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """See `ChatTokenizer.template`."""
        from jinja2 import TemplateError

        chat = [{"role": m.role, "content": m.content} for m in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, KeyError, ValueError, IndexError) as e:
            raise ChatError(f"the model's chat template refuses this chat: {e}") from e
        return str(text)

    def encode(self, text: str) -> list[int]:
        """See `ChatTokenizer.encode`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `ChatTokenizer.decode`."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)
