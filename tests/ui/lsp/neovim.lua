-- Drives a language server from Neovim, headless: hints, an edit, a code action, undo, a save.
-- Environment: SERVER (the command, one word a line), SCRIPT (the file), ANSWER (where the result goes).
local steps = {}
local wait_ms = 90000

local function note(name, value) steps[name] = value end

local function finish()
  local file = io.open(os.getenv("ANSWER"), "w")
  file:write(vim.fn.json_encode(steps))
  file:close()
  vim.cmd("qall!")
end

local function ask(client, method, params)
  local answer = client.request_sync(method, params, wait_ms, vim.api.nvim_get_current_buf())
  assert(answer and not answer.err, method .. ": " .. vim.inspect(answer))
  return answer.result
end

local function document() return { uri = vim.uri_from_bufnr(0) } end

local function hints(client)
  local everything = { start = { line = 0, character = 0 }, ["end"] = { line = 100000, character = 0 } }
  local lines = {}
  for _, hint in ipairs(ask(client, "textDocument/inlayHint", { textDocument = document(), range = everything }) or {}) do
    lines[tostring(hint.position.line)] = hint.label
  end
  return lines
end

local function until_hint(client, words)
  local found
  local ok = vim.wait(wait_ms, function()
    for _, label in pairs(hints(client)) do
      if label:find(words, 1, true) then found = true end
    end
    return found
  end, 100)
  assert(ok, "no hint with " .. words .. ": " .. vim.inspect(hints(client)))
  return hints(client)
end

local function text() return table.concat(vim.api.nvim_buf_get_lines(0, 0, -1, false), "\n") end

local function drive()
  vim.cmd("edit " .. vim.fn.fnameescape(os.getenv("SCRIPT")))
  local id = vim.lsp.start_client({
    name = "stepscope",
    cmd = vim.split(os.getenv("SERVER"), "\n"),
    root_dir = vim.fn.fnamemodify(os.getenv("SCRIPT"), ":h"),
    init_options = { estimate = false },
    flags = { debounce_text_changes = 0 }, -- every edit is sent before the next question
  })
  vim.lsp.buf_attach_client(0, id)
  local client
  assert(vim.wait(wait_ms, function()
    client = vim.lsp.get_client_by_id(id)
    return client and client.initialized
  end, 20), "the server did not start")

  ask(client, "workspace/executeCommand", { command = "stepscope.profile", arguments = { document().uri } })
  note("measured", until_hint(client, " ms"))

  -- An edit above: the hints move with their lines.
  vim.api.nvim_buf_set_lines(0, 0, 0, false, { "# one line more" })
  note("moved", hints(client))
  vim.cmd("undo")
  note("undone", hints(client))

  -- A code action at the optimizer, applied by Neovim; then undone by Neovim.
  local place = vim.fn.search("optimizer = ") - 1
  local range = { start = { line = place, character = 0 }, ["end"] = { line = place, character = 4 } }
  local actions = ask(client, "textDocument/codeAction",
    { textDocument = document(), range = range, context = { diagnostics = {} } })
  local before = text()
  for _, action in ipairs(actions) do
    if action.title:find("fused-optimizer:", 1, true) then
      vim.lsp.util.apply_workspace_edit(action.edit, client.offset_encoding)
    end
  end
  note("patched", text())
  note("stale", hints(client))
  vim.cmd("undo")
  note("restored", text() == before)

  -- Saved with another number: measured anew.
  ask(client, "workspace/executeCommand",
    { command = "stepscope.profileOnSave", arguments = { document().uri, true } })
  vim.cmd([[%s/3\.5 ms/7.25 ms/e]])
  vim.cmd([[%s/default=1024/default=512/e]])
  vim.cmd("write")
  assert(vim.wait(wait_ms, function()
    for _, label in pairs(hints(client)) do return not label:find("was", 1, true) end
  end, 100), "nothing was measured after the save")
  note("saved", hints(client))
  note("diagnostics", #vim.diagnostic.get(0))
end

local ok, why = pcall(drive)
if not ok then note("failed", tostring(why)) end
finish()
