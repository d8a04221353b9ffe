"""What the server runs, in Lua, inside the MULTI of the sink.

An error of a command in EXEC does not undo the other ones.  So each script that has done its work
adds 1 to the field ``chunks`` of the checkpoint, and ``COMMIT`` stores the checkpoint only if all
of them did.  KEYS[1] is the checkpoint in every script.
"""

from __future__ import annotations

_DONE = "redis.call('HINCRBY', KEYS[1], 'chunks', 1)"

_OLDER = """\
local function is_less(a, b)  -- decimal numbers, which may be larger than Lua's are exact
  return #a < #b or (#a == #b and a < b)
end
local function is_newer(key, scn, seq)  -- than this position
  local old = redis.call('HMGET', key, '_scn', '_seq')
  return old[1] and (is_less(scn, old[1]) or (scn == old[1] and is_less(seq, old[2] or '')))
end
"""

ROWS = f"""{_OLDER}
-- KEYS: a hash for each row. ARGV of each row: scn, seq, count of fields (-1: delete the hash),
-- count of absent columns, fields and their values, names of the absent columns.
local at = 1
for n = 2, #KEYS do
  local key, scn, seq = KEYS[n], ARGV[at], ARGV[at + 1]
  local count, absent = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local first, after = at + 4, at + 4 + 2 * math.max(count, 0)
  at = after + absent
  if not is_newer(key, scn, seq) then
    if count < 0 then
      redis.call('UNLINK', key)
    else
      redis.call('HSET', key, '_scn', scn, '_seq', seq, unpack(ARGV, first, after - 1))
      if redis.call('HLEN', key) > count + 2 then
        local wanted = {{ _scn = true, _seq = true }}
        for i = first, after - 1, 2 do wanted[ARGV[i]] = true end
        for i = after, at - 1 do wanted[ARGV[i]] = true end
        for _, field in ipairs(redis.call('HKEYS', key)) do
          if not wanted[field] then redis.call('HDEL', key, field) end
        end
      end
    end
  end
end
{_DONE}
"""
"""Writes hashes.  A field that is neither written nor absent goes: NULL, or a dropped column."""

EMPTY = f"""{_OLDER}
-- ARGV: pattern of the keys, scn, seq.
local cursor = '0'
repeat
  local found = redis.call('SCAN', cursor, 'MATCH', ARGV[1], 'COUNT', 1000, 'TYPE', 'hash')
  cursor = found[1]
  for _, key in ipairs(found[2]) do
    if not is_newer(key, ARGV[2], ARGV[3]) then redis.call('UNLINK', key) end
  end
until cursor == '0'
{_DONE}
"""
"""Removes the hashes of a target.  It visits every key of the database."""

ENTRIES = f"""
-- KEYS: a stream for each entry. ARGV: length of the streams or '', then of each entry: count of
-- fields, fields and their values.
local length, at = ARGV[1], 2
for n = 2, #KEYS do
  local count = tonumber(ARGV[at])
  local first, last = at + 1, at + 2 * count
  if length == '' then
    redis.call('XADD', KEYS[n], '*', unpack(ARGV, first, last))
  else
    redis.call('XADD', KEYS[n], 'MAXLEN', '~', length, '*', unpack(ARGV, first, last))
  end
  at = last + 1
end
{_DONE}
"""
"""Appends to streams."""

COMMIT = """
-- ARGV: how many scripts ran before this one, the checkpoint.
local done = redis.call('HGET', KEYS[1], 'chunks') or '0'
redis.call('HDEL', KEYS[1], 'chunks')
if done ~= ARGV[1] then
  return redis.error_reply('DATABUS only ' .. done .. ' of ' .. ARGV[1] .. ' scripts succeeded')
end
redis.call('HSET', KEYS[1], 'checkpoint', ARGV[2])
"""
"""Stores the checkpoint if everything before it was written."""
