"""``ddpdoctor lsp`` with a real client, in a process of its own."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from lsprotocol import types
from pygls.lsp.client import LanguageClient

SICK = """\
# \U0001f600 counts as two in UTF-16
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, path, rank):
    torch.cuda.set_device(0)
    model = DDP(model)
    model.load_state_dict(torch.load(path))
"""
LIMIT = 60.0  # seconds


class Client(LanguageClient):
    """Keeps the diagnostics that it gets."""

    def __init__(self) -> None:
        super().__init__("test", "1")
        self.published: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()

        @self.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)  # type: ignore[untyped-decorator]
        def published(params: types.PublishDiagnosticsParams) -> None:
            self.published.put_nowait(params)


def serve(test: Callable[[Client, types.InitializeResult], Awaitable[None]]) -> None:
    async def run() -> None:
        client = Client()
        await client.start_io(sys.executable, "-m", "ddpdoctor", "lsp")
        try:
            capabilities = types.ClientCapabilities()
            result = await client.initialize_async(
                types.InitializeParams(capabilities=capabilities, root_uri=None)
            )
            client.initialized(types.InitializedParams())
            try:
                await test(client, result)
            finally:
                await client.shutdown_async(None)
                client.exit(None)
        finally:
            await client.stop()  # type: ignore[no-untyped-call]

    asyncio.run(asyncio.wait_for(run(), LIMIT))


def opened(client: Client, uri: str, text: str) -> None:
    document = types.TextDocumentItem(uri=uri, language_id="python", version=1, text=text)
    client.text_document_did_open(types.DidOpenTextDocumentParams(text_document=document))


def test_problems_hover_and_fix(tmp_path: Path) -> None:
    uri = (tmp_path / "train.py").as_uri()

    async def test(client: Client, _: types.InitializeResult) -> None:
        opened(client, uri, SICK)
        (diagnostic,) = (await client.published.get()).diagnostics
        assert (diagnostic.code, diagnostic.source) == ("DDP503", "ddpdoctor")
        assert diagnostic.range.start == types.Position(line=7, character=26)
        identifier = types.TextDocumentIdentifier(uri=uri)
        hover = await client.text_document_hover_async(
            types.HoverParams(text_document=identifier, position=diagnostic.range.start)
        )
        assert hover is not None
        assert isinstance(hover.contents, types.MarkupContent)
        assert "How to fix it" in hover.contents.value
        actions = await client.text_document_code_action_async(
            types.CodeActionParams(
                text_document=identifier,
                range=diagnostic.range,
                context=types.CodeActionContext(diagnostics=[diagnostic]),
            )
        )
        assert actions
        action = actions[0]
        assert isinstance(action, types.CodeAction)
        assert action.edit is not None
        assert action.edit.changes is not None
        (edit,) = action.edit.changes[uri]
        assert edit.new_text == ', map_location="cpu"'
        assert edit.range.start == types.Position(line=7, character=41)
        client.text_document_did_change(
            types.DidChangeTextDocumentParams(
                text_document=types.VersionedTextDocumentIdentifier(uri=uri, version=2),
                content_changes=[
                    types.TextDocumentContentChangePartial(range=edit.range, text=edit.new_text)
                ],
            )
        )
        assert [each.message for each in (await client.published.get()).diagnostics] == []

    serve(test)


def test_broken_code_and_a_helper_beside_it(tmp_path: Path) -> None:
    uri = (tmp_path / "train.py").as_uri()
    (tmp_path / "helpers.py").write_text(
        "import torch.distributed as dist\n\ndef total(x):\n    dist.all_reduce(x)\n"
    )
    (tmp_path / "train.py").write_text("from helpers import total\n")

    async def test(client: Client, _: types.InitializeResult) -> None:
        opened(client, uri, "def f(:\n")
        (diagnostic,) = (await client.published.get()).diagnostics
        assert diagnostic.code == "DDP016"
        opened(
            client,
            uri,
            "import torch.distributed as dist\nfrom helpers import total\n\n"
            "def f(x):\n    if dist.get_rank() == 0:\n        total(x)\n",
        )
        (diagnostic,) = (await client.published.get()).diagnostics
        assert diagnostic.code == "DDP401"

    serve(test)


def test_a_file_is_no_argument() -> None:
    from ddpdoctor.commands import lsp
    from ddpdoctor.core.errors import DoctorError

    with pytest.raises(DoctorError, match="takes no file"):
        lsp.main(["train.py"])


NEOVIM = """
vim.cmd('edit train.py')
local client = vim.lsp.start_client({cmd = COMMAND, root_dir = vim.fn.getcwd()})
vim.lsp.buf_attach_client(0, client)
local function count() return #vim.diagnostic.get(0) end
vim.wait(LIMIT, function() return count() > 0 end, 50)
local first = vim.diagnostic.get(0)[1]
print(string.format('%d:%d %s', first.lnum + 1, first.col + 1, first.message))
local at = {line = first.lnum, character = first.col}
local file = {uri = vim.uri_from_bufnr(0)}
local function ask(what, more)
  local request = vim.tbl_extend('force', {textDocument = file}, more)
  for _, each in pairs(vim.lsp.buf_request_sync(0, what, request, LIMIT)) do return each.result end
end
print(ask('textDocument/hover', {position = at}).contents.value)
local span = {start = at, ['end'] = at}
local more = {range = span, context = {diagnostics = {}}}
vim.lsp.util.apply_workspace_edit(ask('textDocument/codeAction', more)[1].edit, 'utf-16')
vim.wait(LIMIT, function() return count() == 0 end, 50)
print('left: ' .. count())
vim.cmd('write')
vim.cmd('qall!')
"""


@pytest.mark.skipif(shutil.which("nvim") is None, reason="Neovim is not installed")
def test_neovim(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SICK)
    command = f"{{'{sys.executable}', '-m', 'ddpdoctor', 'lsp'}}"
    lua = NEOVIM.replace("COMMAND", command).replace("LIMIT", str(int(LIMIT * 1000)))
    (tmp_path / "test.lua").write_text(lua)
    done = subprocess.run(
        ["nvim", "--headless", "-u", "NONE", "-c", "luafile test.lua"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert "8:27 every rank loads this checkpoint" in said
    assert "DDP503: " in said
    assert "left: 0" in said
    assert 'torch.load(path, map_location="cpu")' in (tmp_path / "train.py").read_text()
