-- Fetch the record under KEYS[1], else the tombstone under KEYS[2], and read its head.
-- in   now
-- out  text (false: there is neither; nil: unreadable, which is never an error here and never deleted), buried (only the
--      tombstone is left), seen (model.view: nil when the key is as good as never used), and the record's fields
local magic, version, state, flags, policy, attempts, print_version, print_size, nonce_size
local tenant_size, operation_size, key_size, token, created, updated, expires
local lease_until, noted, steps_size, tombstone, not_before
local ref_size, marker_size, secret_size, labels_size, error_size
local body, nonce, print_at, names_at, ref_at, marker_at, secret_at, steps_at, result_at
local seen

local text, buried = redis.pcall('GET', KEYS[1]), false
if text == false then
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
if text and (#text < result_at - 1 or (state == RUNNING and #text ~= result_at - 1)) then text = nil end
--@include view
