"""``troth chat``: a conversation, typed or piped in, one line per turn.

Nothing is ever cut out of it: when the context is full it says so and leaves the choice to the user. Read next:
``conversation.py``, ``answer.py``.
"""

from __future__ import annotations

import re
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Final

from troth.cli.answer import context_is_full, show_answer, why_cut
from troth.cli.conversation import Conversation
from troth.cli.exit_code import DONE, INTERRUPTED
from troth.cli.session import ask, chat_request, sampling, session, thinking
from troth.cli.terminal import Terminal
from troth.errors import ContextExceeded, OptionError, TrothError
from troth.schedule.admission import require_room

if TYPE_CHECKING:
    from troth.library import Engine
    from troth.request_builder import RequestBuilder

PROMPT: Final = "> "
HELP: Final = """\
/system TEXT  set the system message from now on; without TEXT remove it
/undo         forget the last question and its answer
/clear        forget the whole conversation
/quit         leave, as Ctrl-D does
/help         this list
Ctrl-C stops an answer and keeps what was said. A line that begins with // is sent with one / less."""
FULL: Final = "/undo takes the last turn back, /clear begins anew, --context gives more room where the model allows it."
_COMMAND: Final = re.compile(r"/([a-zA-Z]*)(?:\s+(.*))?", re.DOTALL)


def run(args: Namespace, terminal: Terminal) -> int:
    """Talk until the input ends. Raises TrothError; when a person types, refused turns are told instead."""
    options, conversation = sampling(args) | thinking(args), Conversation(args.system)

    def check(builder: RequestBuilder, most_tokens: int) -> None:
        # What the first question will be nobody knows; one that is longer is refused when it is asked.
        require_room(chat_request(builder, conversation.asking("?"), options), most_tokens)

    with session(args, terminal, check) as engine:
        chat = Chat(engine, terminal, conversation, options)
        if terminal.is_interactive:
            terminal.note(f"{engine.info.model}, {engine.info.context_tokens:,} tokens of context. /help for help.")
            return chat.talk()
        return chat.read_script()


class Chat:
    """One conversation with one engine.

    Args:
        engine: answers.
        terminal: where questions come from and answers go.
        conversation: what was said so far.
        options: of every answer, as ``Engine.stream`` takes them.
    """

    def __init__(self, engine: Engine, terminal: Terminal, conversation: Conversation, options: dict[str, Any]) -> None:
        self._engine = engine
        self._terminal = terminal
        self._conversation = conversation
        self._options = options
        self._left = False

    def talk(self) -> int:
        """Ask a person for lines until they leave; the exit code."""
        leaving = False
        while not self._left:
            try:
                line = _typed_line()
            except EOFError:
                self._terminal.line()
                return DONE
            except KeyboardInterrupt:
                self._terminal.line()
                if leaving:
                    return INTERRUPTED
                leaving = True
                self._terminal.note("Ctrl-C again or Ctrl-D leaves.")
                continue
            try:
                leaving = self.take(line)
            except TrothError as error:
                leaving = False
                self._terminal.note(str(error))
            if leaving:
                self._terminal.note("Stopped. Ctrl-C again leaves.")
        return DONE

    def read_script(self) -> int:
        """Take the lines of standard input; the exit code. Raises TrothError at the first turn that is refused."""
        for line in self._terminal.input_lines():
            if self.take(line):
                return INTERRUPTED
            if self._left:
                break
        return DONE

    def take(self, line: str) -> bool:
        """Answer a line or obey it; whether Ctrl-C cut the answer short. Raises TrothError, changing nothing."""
        text = line.strip()
        if not text:
            return False
        command = _COMMAND.fullmatch(text)
        if command is not None:
            self._obey(command[1].lower(), command[2])
            return False
        return self._answer(text.removeprefix("/") if text.startswith("//") else text)

    def _answer(self, question: str) -> bool:
        messages = self._conversation.asking(question)
        try:
            reply, interrupted = show_answer(ask(self._engine, messages, self._options), self._terminal)
        except ContextExceeded as error:
            raise OptionError(f"{_full(error)} {FULL}") from error
        if reply.text:
            self._conversation.add(question, reply.text, reply.reasoning)
        else:
            self._terminal.note("There was no answer; the question is forgotten.")
        max_tokens = self._options.get("max_tokens")
        if (reason := why_cut(reply, max_tokens, self._engine.info.context_tokens)) is not None:
            helps = reply.text and context_is_full(reply, max_tokens)
            self._terminal.note(f"{reason} {FULL}" if helps else reason)
        return interrupted

    def _obey(self, name: str, text: str | None) -> None:
        say = self._terminal.note
        if name == "help":
            say(HELP)
        elif name == "clear":
            self._conversation.clear()
            say("The conversation is forgotten.")
        elif name == "undo":
            undone = self._conversation.undo()
            say(f"The last turn is forgotten; {len(self._conversation)} left." if undone else "Nothing was said yet.")
        elif name == "system":
            self._conversation.system = text
            say("The system message is set." if text else "The system message is removed.")
        elif name == "quit":
            self._left = True
        else:
            raise OptionError(f"/{name} is no command; /help lists them, and // begins a line with /")


def _typed_line() -> str:
    try:
        # Importing it is what gives input() line editing and history.
        import readline  # noqa: F401
    except ImportError:  # some builds of Python have none
        pass
    return input(PROMPT)


def _full(error: ContextExceeded) -> str:
    return (
        f"The context is full: the conversation has {error.num_prompt_tokens:,} tokens and {error.max_tokens:,} more "
        f"are wanted for the answer, of {error.limit:,}."
    )
