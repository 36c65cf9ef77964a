-- Nearly every settle: an owner's result for a run under retry that has no steps, ref or marker. What follows in settle.lua
-- decides the same, with all fields at hand, in half as much time again; whatever is unusual is left to it.
-- in   ending, result
if result and #ending == 77 and sub(ending, 33, 61) == PLAIN then
  local run = redis.pcall('GET', KEYS[1])
  if type(run) == 'string' and sub(run, 1, 4) == '\94\1\1\8' and sub(run, 58, 89) == BARE then
    local retention, keep_known, after, skew = unpack('<dddd', ending)
    local print_size, nonce_size, tenant_size, operation_size, key_size = unpack('<BBHHH', run, 10)
    local secret_size, labels_size, error_size = unpack('<HI4I4', run, 90)
    local labels_at = WIDE_SIZE + 17 + print_size + tenant_size + operation_size + key_size + secret_size
    local now, owner = real + skew, sub(ending, 62)
    if retention >= 0 and keep_known >= 0 and after == 0 and nonce_size == 16 and sub(run, 100, 115) == owner
      and error_size == 0 and #run == labels_at - 1 + labels_size and now < unpack('<d', run, 42) then
      local hash, gone, known = sub(KEYS[1], -32), now + retention, 0
      if keep_known > 0 and gone < huge then known = gone + keep_known end
      redis.call('HINCRBY', KEYS[5], 'done', 1)

      local changed
      if known == 0 and secret_size + labels_size == 0 then
        changed = '\94\1\2\0' .. sub(run, 5, 33) .. pack('<dd', now, gone) .. sub(run, 100) .. result
      else
        local times = sub(run, 5, 33) .. pack('<ddd', now, gone, now) .. sub(run, 58, 69) .. pack('<d', known)
        if known ~= 0 then
          local stone = '\94\1\2\24' .. times .. sub(run, 78, 91) .. '\0\0\0\0\0\0\0\0' .. sub(run, 100, labels_at - 1)
          local stays = ceil((known - now + real) * 1000)
          if stays < NEVER then
            redis.call('SET', KEYS[2], stone, 'PXAT', string.format('%.0f', stays))
          else
            redis.call('SET', KEYS[2], stone)
          end
        end
        changed = '\94\1\2\8' .. times .. sub(run, 78) .. result
      end

      local milliseconds = max(1, ceil((gone - now + real) * 1000))
      if milliseconds < NEVER then
        redis.call('SET', KEYS[1], changed, 'PXAT', string.format('%.0f', milliseconds))
      else
        redis.call('SET', KEYS[1], changed)
      end
      redis.call('ZREM', KEYS[3], hash)
      redis.pcall('SPUBLISH', KEYS[1], '')
      return sub(hash, 1, 8) .. owner .. 'O'
    end
  end
end
