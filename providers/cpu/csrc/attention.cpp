// Divides a problem into tasks and runs them: all new tokens into the cache first, then attention,
// then, where one sequence's keys were divided, the merging of their parts. Segments of keys that
// several sequences have in the same blocks are attended to by all of their rows at once.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "kernels.h"
#include "scratch.h"

namespace onnxport {
namespace {

// Below this many elements or multiply-adds, waking another thread costs more than it saves.
constexpr int64_t kSerialPrepare = 1 << 14;
constexpr int64_t kSerialAttend = 1 << 14;
constexpr int64_t kTilesFrom = 8 * kTile;  // tokens
// Fewer row blocks than this are divided along their keys, too.
constexpr size_t kEnoughBlocks = 32;
// What the parts of divided blocks may take together, 32 MiB for so many threads: as many of them as
// there are segments of a long context would take hundreds, which no memory plan knows of. Blocks for
// which nothing is left are not divided. Those that share a prefix always are, some after the others
// where there is not room for all.
constexpr int64_t kMostStateFloats = 8 << 20, kStateThreads = 4;
// Rows of several sequences that go together over keys they share, at most.
constexpr int64_t kSharedRows = 64;
// Rows of latents in a task where they cannot be divided along their keys, at most: with up to 128 heads
// a long sequence would be one thread's.
constexpr int32_t kLatentRows = 32;
// Heads take turns while so many tasks are left for each thread.
constexpr size_t kTasksPerThread = 8;

// A row block over all of its keys, or over one segment of them.
struct Work {
  RowBlock block;
  int64_t segment;
  size_t state;  // where a segment's result goes, in Workspace::all_states
  bool divided;
  int32_t heads = 1;  // KV heads, from the block's own on
};

// The segments of one divided row block: states [first, first + count).
struct Division {
  RowBlock block;
  size_t first, count;
};

// Sequences [begin, end), whose first so many keys, whole segments, are in the same blocks. Of each
// KV head and segment there is one state of all their rows, from `states` on; the heads whose turn it
// is are [first_head, last_head).
struct Group {
  int64_t begin, end, keys;
  size_t states;
  int64_t first_head, last_head;
};

// A state that is made of some rows of another one.
struct Slice {
  size_t state, from;
  int64_t row;
};

std::atomic<int64_t> most_state_floats{kMostStateFloats};
std::atomic<size_t> session_threads{0};  // 0: not told

struct Workspace {
  Buffer queries, states;
  std::vector<RowBlock> blocks;
  std::vector<Work> work;
  std::vector<Division> divisions;
  std::vector<State> all_states;
  std::vector<Group> groups;
  std::vector<Slice> slices;
};

// Workspaces go back here, so that concurrent calls, from any number of sessions, each have one
// and none is allocated twice.
class WorkspacePool {
 public:
  std::unique_ptr<Workspace> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Workspace>();
    std::unique_ptr<Workspace> workspace = std::move(idle_.back());
    idle_.pop_back();
    return workspace;
  }
  void give(std::unique_ptr<Workspace> workspace) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(workspace));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> idle_;
};

WorkspacePool& pool() {
  // Never destroyed: a worker thread may outlive the library's static objects.
  static WorkspacePool* instance = new WorkspacePool;
  return *instance;
}

class Lease {
 public:
  Lease() : workspace_(pool().take()) {}
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { pool().give(std::move(workspace_)); }
  Workspace& operator*() const { return *workspace_; }

 private:
  std::unique_ptr<Workspace> workspace_;
};

float* thread_scratch(int64_t floats) {
  thread_local Buffer buffer;
  return buffer.reserve<float>(static_cast<size_t>(floats));
}

struct Run {
  const Problem& p;
  const Kernels& kernels;
  Workspace& space;
  float* queries;
  int64_t tokens_per_task;
  std::atomic<bool> out_of_memory{false};

  Run(const Problem& problem, const Kernels& k, Workspace& s, float* q)
      : p(problem), kernels(k), space(s), queries(q), tokens_per_task(problem.num_tokens) {}

  // Exceptions may not cross the caller's thread pool.
  template <class F>
  void guarded(F f) {
    try {
      f();
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
  }

  int for_each(size_t count, bool serial, Task task) {
    if (!serial && count > 1 && p.parallel_for)
      return p.parallel_for(p.parallel_context, count, task, this);
    for (size_t i = 0; i < count; i++) task(this, i);
    return 0;
  }
};

void prepare_task(void* argument, size_t index) {
  Run& run = *static_cast<Run*>(argument);
  const int64_t begin = static_cast<int64_t>(index) * run.tokens_per_task;
  const int64_t end = std::min(run.p.num_tokens, begin + run.tokens_per_task);
  run.kernels.prepare(run.p, run.queries, begin, end);
}

KeyRange block_keys(const Problem& p, const RowBlock& block) {
  if (block.shared_keys) return {0, block.shared_keys};
  const int64_t group = p.num_heads / p.kv_heads;
  return {visible_keys(p, block.sequence, block.row_begin / group).first,
          visible_keys(p, block.sequence, (block.row_end - 1) / group).last};
}

KeyRange keys_of(const Problem& p, const Work& work) {
  const KeyRange all = block_keys(p, work.block);
  if (!work.divided) return all;
  return {std::max(all.first, work.segment * kSegment),
          std::min(all.last, (work.segment + 1) * kSegment)};
}

// A thread's tasks mostly follow one another. If they do not, something is asked for in vain.
Reading reading_of(const Run& run, size_t index) {
  thread_local const Run* last_run = nullptr;
  thread_local size_t last_index = 0;
  const std::vector<Work>& work = run.space.work;
  Reading reading;
  reading.own = keys_of(run.p, work[index]);
  reading.is_asked_for = last_run == &run && last_index + 1 == index;
  last_run = &run;
  last_index = index;
  if (index + 1 == work.size()) return reading;
  const Work& next = work[index + 1];
  reading.sequence = next.block.sequence;
  reading.kv_head = next.block.kv_head;
  reading.heads = next.heads;
  reading.next = keys_of(run.p, next);
  return reading;
}

void attend_task(void* argument, size_t index) {
  Run& run = *static_cast<Run*>(argument);
  const Work& work = run.space.work[index];
  run.guarded([&] {
    float* scratch = thread_scratch(scratch_floats(run.p));
    const Reading reading = reading_of(run, index);
    if (work.divided)
      run.kernels.attend_segment(run.p, run.queries, work.block, reading, work.segment,
                                 run.space.all_states[work.state], scratch);
    else
      run.kernels.attend(run.p, run.queries, work.block, work.heads, reading, scratch);
  });
}

void finish_task(void* argument, size_t index) {
  Run& run = *static_cast<Run*>(argument);
  const Division& division = run.space.divisions[index];
  run.kernels.finish(run.p, division.block, run.space.all_states.data() + division.first,
                     static_cast<int64_t>(division.count));
}

int prepare(Run& run) {
  const Problem& p = run.p;
  const int64_t per_token = (p.num_heads + 2 * p.kv_heads) * p.head_size;
  const bool serial = p.num_tokens * per_token < kSerialPrepare;
  const int64_t tasks =
      serial ? 1 : std::min<int64_t>(64, p.num_tokens * per_token * 2 / kSerialPrepare);
  run.tokens_per_task = (p.num_tokens + tasks - 1) / tasks;
  // Whole tiles are written in less time than token by token.
  if (p.num_tokens >= kTilesFrom)
    run.tokens_per_task = (run.tokens_per_task + kTile - 1) / kTile * kTile;
  const int64_t count = (p.num_tokens + run.tokens_per_task - 1) / run.tokens_per_task;
  return run.for_each(static_cast<size_t>(count), serial, prepare_task);
}

int64_t rows_of(const RowBlock& block) { return block.row_end - block.row_begin; }

int64_t cost(const Problem& p, const RowBlock& block) {
  const KeyRange keys = block_keys(p, block);
  return (keys.last - keys.first) * rows_of(block) * p.head_size;
}

// Row blocks in space.blocks, the long ones first so that no thread is left with one at the end.
void plan_blocks(const Problem& p, Workspace& space) {
  const int64_t group = p.num_heads / p.kv_heads;
  space.blocks.clear();
  for (int64_t s = 0; s < p.batch; s++) {
    const int64_t rows = (p.cumulative_lengths[s + 1] - p.cumulative_lengths[s]) * group;
    const int64_t parts = (rows + kRowBlock - 1) / kRowBlock;
    for (int64_t i = parts - 1; i >= 0; i--)
      for (int64_t head = 0; head < p.kv_heads; head++)
        space.blocks.push_back({static_cast<int32_t>(s), static_cast<int32_t>(head),
                                static_cast<int32_t>(rows * i / parts),
                                static_cast<int32_t>(rows * (i + 1) / parts)});
  }
  if (p.batch > 1)
    std::stable_sort(space.blocks.begin(), space.blocks.end(),
                     [&](const RowBlock& a, const RowBlock& b) { return cost(p, a) > cost(p, b); });
}

int64_t rows_of(const Problem& p, int64_t begin, int64_t end) {
  return (p.cumulative_lengths[end] - p.cumulative_lengths[begin]) * (p.num_heads / p.kv_heads);
}

// Keys before a sequence's new tokens, in whole segments; 0 unless all of these see all of them.
int64_t keys_before(const Problem& p, int64_t sequence) {
  const int64_t tokens = p.cumulative_lengths[sequence + 1] - p.cumulative_lengths[sequence];
  if (tokens == 0 || visible_keys(p, sequence, tokens - 1).first > 0) return 0;
  return p.past_lengths[sequence] / kSegment * kSegment;
}

// The first keys that two sequences have in the same blocks, in whole segments, up to so many.
int64_t shared_keys(const Problem& p, int64_t one, int64_t other, int64_t most) {
  const int32_t* a = p.block_table + one * p.table_width;
  const int32_t* b = p.block_table + other * p.table_width;
  int64_t blocks = 0;
  while (blocks * p.block_size < most && a[blocks] == b[blocks]) blocks++;
  return std::min(most, blocks * p.block_size) / kSegment * kSegment;
}

// Finds sequences of few rows, one behind the other, that begin with the same blocks. As many as
// fit go together while another one saves more than what it does not share takes away.
void find_groups(const Problem& p, Workspace& space) {
  space.groups.clear();
  for (int64_t begin = 0, end; begin < p.batch; begin = end) {
    end = begin + 1;
    int64_t keys = keys_before(p, begin);
    while (keys && end < p.batch && rows_of(p, begin, end + 1) <= kSharedRows) {
      const int64_t most = std::min(keys, keys_before(p, end));
      const int64_t common = shared_keys(p, begin, end, most);
      if (common * (end - begin) < std::max<int64_t>(1, keys * (end - begin - 1))) break;
      keys = common;
      end++;
    }
    if (end - begin > 1) space.groups.push_back({begin, end, keys, 0, 0, 0});
  }
}

const Group* group_of(const Workspace& space, int64_t sequence) {
  for (const Group& group : space.groups)
    if (group.begin <= sequence && sequence < group.end) return &group;
  return nullptr;
}

// Floats that the states of one KV head of a group take.
int64_t head_floats(const Problem& p, const Group& group) {
  const int64_t rows = rows_of(p, group.begin, group.end);
  int64_t floats = group.keys / kSegment * state_floats(rows, p.value_size);
  for (int64_t s = group.begin; s < group.end; s++) {
    const int64_t tokens = p.cumulative_lengths[s + 1] - p.cumulative_lengths[s];
    const int64_t own = p.past_lengths[s] + tokens - group.keys;
    floats += (own + kSegment - 1) / kSegment * state_floats(rows_of(p, s, s + 1), p.value_size);
  }
  return floats;
}

// Which heads of the groups come next, as many as there is room for and at least one: those behind
// `done` of them, group by group. Returns how many are done then, and takes what they need.
size_t choose_heads(const Problem& p, Workspace& space, size_t done, int64_t& floats_left) {
  const auto heads = static_cast<size_t>(p.kv_heads);
  for (Group& group : space.groups) group.first_head = group.last_head = 0;
  bool is_first = true;
  for (size_t i = done / heads; i < space.groups.size(); i++) {
    Group& group = space.groups[i];
    const int64_t floats = head_floats(p, group);
    const auto next = static_cast<int64_t>(done - i * heads);
    const int64_t room = std::max<int64_t>(is_first, floats_left / floats);
    group.first_head = next;
    group.last_head = std::min(p.kv_heads, next + room);
    floats_left = std::max<int64_t>(0, floats_left - floats * (group.last_head - next));
    done = i * heads + static_cast<size_t>(group.last_head);
    if (group.last_head < p.kv_heads) break;
    is_first = false;
  }
  return done;
}

// What the rows of each group share: heads of the same keys one after the other, as divide() has
// them.
void plan_groups(const Problem& p, Workspace& space) {
  for (Group& group : space.groups) {
    const auto heads = static_cast<size_t>(group.last_head - group.first_head);
    const auto segments = static_cast<size_t>(group.keys / kSegment);
    group.states = space.all_states.size();
    for (size_t segment = 0; segment < segments; segment++)
      for (size_t head = 0; head < heads; head++) {
        const auto kv_head = static_cast<int32_t>(group.first_head + static_cast<int64_t>(head));
        const RowBlock block{static_cast<int32_t>(group.begin), kv_head, 0,
                             static_cast<int32_t>(rows_of(p, group.begin, group.end)),
                             static_cast<int32_t>(group.keys)};
        space.work.push_back(
            {block, static_cast<int64_t>(segment), group.states + head * segments + segment, true});
      }
    space.all_states.resize(group.states + heads * segments);
  }
}

// Divides blocks [begin, end), which are the heads of the same rows, along their keys. Of the same
// keys, heads come one after the other and so mostly on one thread: their tiles lie side by side in
// the cache, and with one head's the processor reads ahead what is the next head's. What the rows'
// group has done already is taken from there.
void divide(const Problem& p, size_t begin, size_t end, const Group* group, Workspace& space) {
  const RowBlock& first_block = space.blocks[begin];
  const KeyRange keys = block_keys(p, first_block);
  const int64_t first = keys.first / kSegment, last = (keys.last + kSegment - 1) / kSegment;
  const size_t states = space.all_states.size(), count = static_cast<size_t>(last - first);
  const size_t heads = end - begin;
  const size_t shared = group ? static_cast<size_t>(group->keys / kSegment) : 0;
  for (size_t i = 0; i < heads; i++) {
    const RowBlock& block = space.blocks[begin + i];
    space.divisions.push_back({block, states + i * count, count});
    for (size_t s = 0; s < shared; s++) {
      const auto head = static_cast<size_t>(block.kv_head - group->first_head);
      const size_t from = group->states + head * shared + s;
      const int64_t row = rows_of(p, group->begin, block.sequence) + block.row_begin;
      space.slices.push_back({states + i * count + s, from, row});
    }
  }
  for (size_t s = shared; s < count; s++)
    for (size_t i = 0; i < heads; i++)
      space.work.push_back({space.blocks[begin + i], first + static_cast<int64_t>(s),
                            states + i * count + s, true});
  space.all_states.resize(states + heads * count);
}

void place_states(const Problem& p, Workspace& space) {
  int64_t floats = 0;
  for (const Work& work : space.work)
    if (work.divided) floats += state_floats(rows_of(work.block), p.value_size);
  float* memory = space.states.reserve<float>(static_cast<size_t>(floats));
  for (const Work& work : space.work) {
    if (!work.divided) continue;
    space.all_states[work.state] = state_at(memory, rows_of(work.block));
    memory += state_floats(rows_of(work.block), p.value_size);
  }
  for (const Slice& slice : space.slices) {
    const State& from = space.all_states[slice.from];
    space.all_states[slice.state] = {from.maximum + slice.row, from.sum + slice.row * 16,
                                     from.value + slice.row * padded(p.value_size)};
  }
}

size_t num_threads() {
  static const size_t processors = std::max(1u, std::thread::hardware_concurrency());
  const size_t told = session_threads;
  return told ? told : processors;
}

// Divides a block of rows of latents into some of fewer rows, which read the same keys.
void divide_rows(const RowBlock& block, Workspace& space) {
  for (int32_t begin = block.row_begin; begin < block.row_end; begin += kLatentRows) {
    RowBlock part = block;
    part.row_begin = begin;
    part.row_end = std::min(block.row_end, begin + kLatentRows);
    space.work.push_back({part, 0, 0, false});
  }
}

// How many heads of the same few rows go to one task: as many as leave some for every thread.
size_t heads_together(const Kernels& kernels, const RowBlock& block, size_t num_blocks) {
  if (rows_of(block) > kTurnRows) return 1;
  const auto most = static_cast<size_t>(kernels.most_turns);
  return std::clamp<size_t>(num_blocks / (kTasksPerThread * num_threads()), 1, most);
}

// Plans the next part of the work, of which all but what waits for room is in the first: heads of
// groups, of which so many are done. Returns how many are done then.
size_t plan_work(const Problem& p, const Kernels& kernels, size_t done, Workspace& space) {
  const bool is_first = done == 0;
  space.work.clear();
  space.divisions.clear();
  space.all_states.clear();
  space.slices.clear();
  const std::vector<RowBlock>& blocks = space.blocks;
  const auto shares = std::max<int64_t>(1, static_cast<int64_t>(num_threads()) / kStateThreads);
  int64_t floats_left = most_state_floats * shares;
  done = choose_heads(p, space, done, floats_left);
  plan_groups(p, space);
  for (size_t begin = 0, end = 0; begin < blocks.size(); begin = end) {
    const RowBlock& first = blocks[begin];
    while (end < blocks.size() && blocks[end].sequence == first.sequence &&
           blocks[end].row_begin == first.row_begin)
      end++;
    const KeyRange keys = block_keys(p, first);
    const bool is_long = keys.last > (keys.first / kSegment + 1) * kSegment;
    const Group* group = group_of(space, first.sequence);
    const int64_t segments = (keys.last + kSegment - 1) / kSegment - keys.first / kSegment;
    const int64_t floats = static_cast<int64_t>(end - begin) * segments *
                           state_floats(rows_of(first), p.value_size);
    const bool is_divided = p.parallel_for && blocks.size() < kEnoughBlocks && is_long;
    if (group) {  // a block of each head
      divide(p, begin + static_cast<size_t>(group->first_head),
             begin + static_cast<size_t>(group->last_head), group, space);
    } else if (!is_first) {
      continue;
    } else if (is_divided && floats <= floats_left) {
      divide(p, begin, end, nullptr, space);
      floats_left -= floats;
    } else if (is_divided && p.latent) {
      divide_rows(first, space);
    } else {
      const size_t together = heads_together(kernels, first, blocks.size());
      for (size_t i = begin; i < end; i += together)
        space.work.push_back(
            {blocks[i], 0, 0, false, static_cast<int32_t>(std::min(together, end - i))});
    }
  }
  place_states(p, space);
  return done;
}

}  // namespace

int64_t set_most_state_floats(int64_t floats) { return most_state_floats.exchange(floats); }

void set_session_threads(int64_t threads) {
  session_threads = static_cast<size_t>(std::max<int64_t>(0, threads));
}

int run_attention(const Problem& p) {
  if (p.num_tokens == 0) return 0;
  const Lease lease;
  Workspace& space = *lease;
  const int64_t floats = p.num_tokens * p.num_heads * p.head_size;
  float* queries = space.queries.reserve<float>(static_cast<size_t>(floats));
  Run run{p, *active_kernels(), space, queries};
  plan_blocks(p, space);
  find_groups(p, space);
  int64_t total = 0;
  for (const RowBlock& block : space.blocks) total += cost(p, block);
  const bool serial = total < kSerialAttend;
  if (const int status = prepare(run)) return status;
  const size_t all = space.groups.size() * static_cast<size_t>(p.kv_heads);
  size_t done = 0;
  do {
    done = plan_work(p, run.kernels, done, space);
    if (const int status = run.for_each(space.work.size(), serial, attend_task)) return status;
    if (const int status = run.for_each(space.divisions.size(), serial, finish_task)) return status;
    if (run.out_of_memory) throw std::bad_alloc();
  } while (done < all);
  return 0;
}

}  // namespace onnxport
