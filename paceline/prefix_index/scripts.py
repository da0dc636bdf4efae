"""The Lua scripts of the prefix table. Each walks one chain of blocks, whose keys are in one slot of a Redis Cluster.

A value is `<boot epoch>:<block id>:<end>`; the end is in seconds of the server's own clock. Errors of single keys (another
type, no memory left) concern those keys alone.
"""

# KEYS: blocks of one chain. ARGV: worker id, TTL in seconds, "<boot epoch>:<block id>" for each key.
# A key lives as long as its youngest field, so what older ones outlive is taken out here, and garbage with it.
# Gives how many keys did not take their entry.
PUBLISH = """
local now = tonumber(redis.call('TIME')[1])
local ends = ':' .. (now + ARGV[2])
local num_refused = 0
for i, key in ipairs(KEYS) do
  if type(redis.pcall('HSET', key, ARGV[1], ARGV[i + 2] .. ends)) ~= 'number' then
    num_refused = num_refused + 1
  else
    redis.pcall('EXPIRE', key, ARGV[2])
    if redis.pcall('HLEN', key) > 1 then
      local fields = redis.pcall('HGETALL', key)
      for f = 1, #fields, 2 do
        local field_ends = string.match(fields[f + 1], '^%d+:%d+:(%d+)$')
        if not field_ends or tonumber(field_ends) < now then redis.pcall('HDEL', key, fields[f]) end
      end
    end
  end
end
return num_refused
"""

# KEYS: blocks of one chain. ARGV: worker id, "<boot epoch>:<block id>" for each key. What was published since under another
# block id, or in another life, stays.
REMOVE = """
for i, key in ipairs(KEYS) do
  local value, own = redis.pcall('HGET', key, ARGV[1]), ARGV[i + 1] .. ':'
  if type(value) == 'string' and string.sub(value, 1, #own) == own then redis.pcall('HDEL', key, ARGV[1]) end
end
return 0
"""

# KEYS: a chain from its first block. ARGV: what the keys of living boot epochs begin with; empty where a script may not read
# them, and then nobody counts as dead.
# Gives one flat list: how many values are garbage, then for each holder of the first block its worker id, its boot epoch, and
# how many blocks it holds from the first without a gap. A few holders are followed block by block, and who drops out is not
# asked for again. Of many, that would keep the server from everybody else for tens of milliseconds: the end of each is found by
# halving, which takes a worker's blocks to have no gap, as caches that lose the last block of a chain first nearly always do.
# Of more than 64 holders some 64 count.
LOOKUP = """
local now = tonumber(redis.call('TIME')[1])
local reply = {0}
local function is_dead(epoch)
  return ARGV[1] ~= '' and not redis.pcall('GET', ARGV[1] .. epoch)
end

local holders, ids = {}, {}
local fields = redis.pcall('HGETALL', KEYS[1])
for f = 1, math.min(#fields, 128), 2 do
  local epoch, ends = string.match(fields[f + 1], '^(%d+):%d+:(%d+)$')
  if not epoch then
    reply[1] = reply[1] + 1
  elseif tonumber(ends) >= now and not is_dead(epoch) then
    ids[#ids + 1] = fields[f]
    holders[#holders + 1] = {fields[f], epoch, '^' .. epoch .. ':%d+:(%d+)$'}
  end
end

local function leave(holder, num_blocks)
  reply[#reply + 1] = holder[1]
  reply[#reply + 1] = holder[2]
  reply[#reply + 1] = num_blocks
end

local function holds(holder, i)
  local value = redis.pcall('HGET', KEYS[i], holder[1])
  local ends = type(value) == 'string' and string.match(value, holder[3])
  return ends and tonumber(ends) >= now
end

if #ids > 4 then
  for _, holder in ipairs(holders) do
    -- It holds the block at `last`, and lacks the one at `gap`.
    local last, gap = 1, #KEYS + 1
    while gap - last > 1 do
      local middle = math.floor((last + gap) / 2)
      if holds(holder, middle) then last = middle else gap = middle end
    end
    leave(holder, last)
  end
  return reply
end

local num_blocks = 1
while #ids > 0 and num_blocks < #KEYS do
  local values = redis.pcall('HMGET', KEYS[num_blocks + 1], unpack(ids))
  for h = #ids, 1, -1 do
    local value = values[h]
    local ends = value and string.match(value, holders[h][3])
    if not ends or tonumber(ends) < now then
      if value and not string.match(value, '^%d+:%d+:%d+$') then reply[1] = reply[1] + 1 end
      leave(holders[h], num_blocks)
      table.remove(holders, h)
      table.remove(ids, h)
    end
  end
  num_blocks = num_blocks + 1
end
for _, holder in ipairs(holders) do leave(holder, num_blocks) end
return reply
"""
