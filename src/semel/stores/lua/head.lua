-- As find.lua, for a script that touches the head of a record only: the steps of a run are not fetched.
-- in   now      out  as find.lua, but `text` is only the beginning
local magic, version, state, flags, policy, attempts, print_version, print_size, nonce_size
local tenant_size, operation_size, key_size, token, created, updated, expires
local lease_until, noted, steps_size, tombstone, not_before
local ref_size, marker_size, secret_size, labels_size, error_size
local body, nonce, print_at, names_at, ref_at, marker_at, secret_at, steps_at, result_at
local seen

local text, buried = redis.pcall('GETRANGE', KEYS[1], 0, WIDE_SIZE + 254), false
if text == '' and redis.call('EXISTS', KEYS[1]) == 0 then
  text, buried = redis.pcall('GET', KEYS[2]), true
end
if text then
  if type(text) == 'table' then
    if not string.find(text.err, 'WRONGTYPE', 1, true) then return text end
    text = nil
  elseif #text < HEAD_SIZE then
    text = nil
  end
end
--@include read
if text then
  local size = buried and #text or redis.call('STRLEN', KEYS[1])
  if size < result_at - 1 or (state == RUNNING and size ~= result_at - 1) then text = nil end
end
--@include view
