if text then
  if state == UNKNOWN then
    seen = UNKNOWN
  elseif state == RUNNING then
    if policy ~= RETRY then
      seen = now < lease_until and RUNNING or UNKNOWN
    elseif now < expires then
      seen = RUNNING
    end
  elseif now < expires and not buried then
    seen = state
  elseif state ~= RELEASED and now < tombstone then
    seen = EXPIRED
  end
end
