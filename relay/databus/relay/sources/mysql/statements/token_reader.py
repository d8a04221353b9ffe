"""A cursor over a statement's tokens, for a grammar written by hand."""

from __future__ import annotations

from collections.abc import Sequence

from databus.relay.sources.mysql.statements.lexer import NotUnderstood, Token, TokenKind

TableName = tuple[str, str]
"""Schema and table."""


def keywords(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


class TokenReader:
    """The tokens from a position on.

    Owner: the function that reads one statement.
    """

    def __init__(self, tokens: Sequence[Token], schema: str, *, folds: bool = False) -> None:
        """``schema`` is the session's, for unqualified names; ``folds``: lower-case names."""
        self._tokens = tokens
        self._schema = schema
        self._folds = folds
        self.at = 0

    @property
    def ended(self) -> bool:
        """Whether all tokens have been read."""
        return self.at >= len(self._tokens)

    @property
    def rest(self) -> Sequence[Token]:
        """The tokens that have not been read."""
        return self._tokens[self.at :]

    def keyword(self, ahead: int = 0) -> str:
        """The next word in upper case; "" if the next token is none."""
        index = self.at + ahead
        return self._tokens[index].keyword if index < len(self._tokens) else ""

    def sign(self) -> str:
        """The next sign; "" if the next token is none."""
        if self.ended or self._tokens[self.at].kind is not TokenKind.SIGN:
            return ""
        return self._tokens[self.at].text

    def accept(self, *words: str) -> bool:
        """Read these words, if they come next."""
        if any(self.keyword(index) != word for index, word in enumerate(words)):
            return False
        self.at += len(words)
        return True

    def accept_any(self, *words: str) -> str:
        """Read one of these words, if it comes next; "" if none does."""
        found = self.keyword()
        if found not in words:
            return ""
        self.at += 1
        return found

    def accept_sign(self, sign: str) -> bool:
        """Read this sign, if it comes next."""
        found = self.sign() == sign
        self.at += found
        return found

    def skip_all(self, *words: str) -> None:
        """Read any number of these words."""
        while self.accept_any(*words):
            pass

    def expect(self, *words: str) -> str:
        """Read one of these words.

        Raises:
            NotUnderstood: another token comes next.
        """
        found = self.accept_any(*words)
        if not found:
            raise NotUnderstood(f"expected {' or '.join(words)}")
        return found

    def require(self, condition: bool, expected: str) -> None:
        """Check that ``condition`` holds.

        Raises:
            NotUnderstood: it does not.
        """
        if not condition:
            raise NotUnderstood(f"expected {expected}")

    def identifier(self) -> str:
        """Read one name.

        Raises:
            NotUnderstood: no name comes next, or one whose characters are not certain.
        """
        if self.ended or self._tokens[self.at].kind not in (TokenKind.WORD, TokenKind.NAME):
            raise NotUnderstood("expected a name")
        text = self._tokens[self.at].text
        if "\N{REPLACEMENT CHARACTER}" in text:
            raise NotUnderstood("a name with characters that could not be decoded")
        self.at += 1
        return text

    def table(self) -> TableName:
        """Read a table's name, with its schema or without.

        Raises:
            NotUnderstood: none comes next, or there is no schema.
        """
        leading = self.accept_sign(".")
        first = self.identifier()
        if not leading and self.accept_sign("."):
            return self.folded((first, self.identifier()))
        self.require(bool(self._schema), "a schema")
        return self.folded((self._schema, first))

    def schema(self) -> str:
        """Read a schema's name.

        Raises:
            NotUnderstood: none comes next.
        """
        return self.folded((self.identifier(), ""))[0]

    def folded(self, name: TableName) -> TableName:
        """A name as names are compared."""
        return (name[0].lower(), name[1].lower()) if self._folds else name

    def possible_tables(self) -> list[TableName]:
        """Every word of the rest that may be a table's name, with the schema in front of it."""
        found = []
        tokens = self.rest
        for index, token in enumerate(tokens):
            if token.kind in (TokenKind.WORD, TokenKind.NAME):
                found.append(self.folded((self._schema, token.text)))
                if index >= 2 and tokens[index - 1].text == ".":
                    found.append(self.folded((tokens[index - 2].text, token.text)))
        return found

    def of_part(self, tokens: Sequence[Token]) -> TokenReader:
        """A reader of some of the tokens, with the same names."""
        return TokenReader(tokens, self._schema, folds=self._folds)

    def tables(self) -> list[TableName]:
        """Read a list of tables.

        Raises:
            NotUnderstood: there is something else.
        """
        found = [self.table()]
        while self.accept_sign(","):
            found.append(self.table())
        return found

    def parts(self) -> list[list[Token]]:
        """The rest, split at the commas outside of parentheses.

        Raises:
            NotUnderstood: the parentheses do not match.
        """
        parts: list[list[Token]] = [[]]
        depth = 0
        for token in self.rest:
            if token.kind is TokenKind.SIGN:
                depth += (token.text == "(") - (token.text == ")")
                if token.text == "," and not depth:
                    parts.append([])
                    continue
            parts[-1].append(token)
        self.require(depth == 0, "matching parentheses")
        self.at = len(self._tokens)
        return parts


def outer_words(tokens: Sequence[Token]) -> list[str]:
    """The keywords outside of parentheses."""
    found = []
    depth = 0
    for token in tokens:
        if token.kind is TokenKind.SIGN:
            depth += (token.text == "(") - (token.text == ")")
        elif not depth and token.keyword:
            found.append(token.keyword)
    return found
