if text then
  magic, version, state, flags, attempts, print_version, print_size, nonce_size,
    tenant_size, operation_size, key_size, token, created, updated, expires = unpack(HEAD, text)
  policy = band(flags, 3)
  if magic ~= MAGIC or version ~= VERSION or state < RUNNING or state > RELEASED or policy > HOLD then
    text = nil
  elseif band(flags, WIDE) == 0 then
    lease_until, noted, steps_size, tombstone, not_before = updated, 0, 0, 0, 0
    ref_size, marker_size, secret_size, labels_size, error_size = NO_REF, 0, 0, 0, 0
    body = HEAD_SIZE + 1
    if state == RUNNING then text = nil end
  elseif #text < WIDE_SIZE then
    text = nil
  else
    lease_until, noted, steps_size, tombstone, not_before,
      ref_size, marker_size, secret_size, labels_size, error_size = unpack(REST, text, HEAD_SIZE + 1)
    body = WIDE_SIZE + 1
  end
end
if text then
  print_at = body + nonce_size
  names_at = print_at + print_size
  ref_at = names_at + tenant_size + operation_size + key_size
  marker_at = ref_size == NO_REF and ref_at or ref_at + ref_size
  secret_at = marker_at + marker_size
  steps_at = secret_at + secret_size + labels_size + error_size
  result_at = steps_at + steps_size
  nonce = sub(text, body, print_at - 1)
end
