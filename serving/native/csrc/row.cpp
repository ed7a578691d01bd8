// One row of logits: changed, narrowed down, drawn from, put back, and its log probabilities.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "adapting.h"
#include "near.h"
#include "nucleus.h"
#include "race.h"
#include "thinning.h"

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr int64_t kNarrow = 16;  // narrowed down to where no more than this part is allowed
constexpr double kReach = 87.0;  // exp(-87) is about the least weight above 0

Scratch& scratch() {
  static thread_local Scratch memory;
  return memory;
}

bool is_token(int64_t id, int64_t vocab) { return id >= 0 && id < vocab; }

bool are_tokens(const int64_t* ids, int64_t count, int64_t vocab) {
  return std::all_of(ids, ids + count, [&](int64_t id) { return is_token(id, vocab); });
}

bool is_valid(const Request& request, int64_t vocab) {
  return are_tokens(request.bias_ids, request.num_biased, vocab) &&
         are_tokens(request.banned, request.num_banned, vocab) &&
         are_tokens(request.seen, request.num_seen, vocab) &&
         are_tokens(request.allowed, request.num_allowed, vocab) &&
         (!request.has_token || is_token(request.token, vocab));
}

// A row of logits that is changed as long as this lives. Nothing in it fails once it changes them.
class Changed {
 public:
  Changed(const Request& request, float* logits, std::vector<Undo>& undo)
      : logits_(logits), undo_(undo) {
    undo_.clear();
    undo_.reserve(static_cast<size_t>(request.num_biased + request.num_banned + request.num_seen));
    for (int64_t i = 0; i < request.num_biased; i++) {
      const int64_t token = request.bias_ids[i];
      set(token, logits[token] + request.bias[i]);
    }
    for (int64_t i = 0; i < request.num_banned; i++) set(request.banned[i], -INFINITY);
    for (int64_t i = 0; i < request.num_seen; i++) {
      const int64_t token = request.seen[i];
      set(token, penalized(request, logits[token], request.counts[i]));
    }
  }
  ~Changed() {
    for (auto old = undo_.rbegin(); old != undo_.rend(); ++old) logits_[old->token] = old->value;
  }
  Changed(const Changed&) = delete;
  Changed& operator=(const Changed&) = delete;

 private:
  // The same arithmetic as in edits.py, in the same order.
  static float penalized(const Request& request, float old, float count) {
    float value = old > 0.f ? old / request.repetition : old * request.repetition;
    value -= request.frequency * count;
    return count > 0.f ? value - request.presence : value;
  }
  void set(int64_t token, float value) {
    undo_.push_back({token, logits_[token]});
    logits_[token] = value;
  }

  float* logits_;
  std::vector<Undo>& undo_;
};

// Few of a row's tokens, ascending, and their logits.
class Narrowed {
 public:
  Narrowed(const float* logits, int64_t most, Shelf& shelf) : logits_(logits), shelf_(shelf) {
    shelf.make_room(most);
  }
  void take(int64_t token) {
    shelf_.values[size_] = logits_[token];
    shelf_.places[size_++] = static_cast<int32_t>(token);
  }
  Candidates all() const { return shelf_.first(static_cast<int64_t>(size_)); }

 private:
  const float* logits_;
  Shelf& shelf_;
  size_t size_ = 0;
};

// The logits of the tokens that are allowed. They are narrowed down to few of them; of many, those
// that are not allowed become -inf in a copy.
Candidates allowed(const Kernels& kernels, const Request& request, const float* logits,
                   int64_t vocab, Shelf& shelf) {
  const uint32_t* mask = request.mask;
  if (request.allowed) {
    Narrowed few(logits, request.num_allowed, shelf);
    for (int64_t i = 0; i < request.num_allowed; i++) {
      const int64_t token = request.allowed[i];
      if (!mask || mask[token / 32] >> (token % 32) & 1) few.take(token);
    }
    return few.all();
  }
  if (!mask) return {logits, nullptr, vocab};
  const int64_t words = (vocab + 31) / 32;
  const int64_t count = kernels.count_bits(mask, words);
  if (count > vocab / kNarrow) {
    shelf.make_room(vocab);
    kernels.copy_allowed(logits, vocab, mask, shelf.values.data());
    return {shelf.values.data(), nullptr, vocab};
  }
  Narrowed few(logits, count, shelf);
  for (int64_t word = 0; word < words; word++) {
    for (uint32_t bits = mask[word]; bits; bits &= bits - 1) {
      const int64_t token = word * 32 + __builtin_ctz(bits);
      if (token < vocab) few.take(token);
    }
  }
  return few.all();
}

float scale_of(const Request& request) {
  return static_cast<float>(kLog2E / std::max(request.temperature, kLeastTemperature));
}

bool is_full(const Request& request) {
  return !request.greedy && !request.has_top_k && request.min_p == 0.0 && request.top_p == 1.0 &&
         !request.is_thinned;
}

bool has_changes(const Request& request) {
  return request.num_biased || request.num_banned || request.num_seen;
}

// A row whose summary is made.
Row row_of(const Kernels& kernels, const Candidates& all, const rows::Summary& summary) {
  const int64_t chunks = num_chunks(all.size);
  const Range least = kernels.scan(summary.least, chunks);
  const float maximum = kernels.scan(summary.largest, chunks).maximum;
  return {all.values, all.size, {maximum, least.minimum, least.has_nan}, summary};
}

rows::Summary summary_in(std::vector<float>& memory, int64_t count) {
  memory.resize(static_cast<size_t>(rows::summary_floats(count)));
  return rows::summary_at(memory.data(), count);
}

// Summarizes values in one pass, while they are in the nearest cache.
Row look_at(const Kernels& kernels, const Candidates& all, float scale,
            std::vector<float>& memory) {
  const rows::Summary summary = summary_in(memory, all.size);
  kernels.summarize(all.values, all.size, scale, summary);
  return row_of(kernels, all, summary);
}

bool is_finite(const Range& range) { return !range.has_nan && std::isfinite(range.maximum); }

int64_t first_of(const Row& row, float value) {
  const float* largest = row.summary.largest;
  int64_t place = (std::find(largest, largest + num_chunks(row.count), value) - largest) * kChunk;
  while (place < row.count - 1 && row.values[place] != value) place++;
  return std::min(place, row.count - 1);
}

// From what is left when the unlikely ones are gone, the largest first.
int64_t draw_truncated(const Kernels& kernels, const Row& row, Weighing by, const Request& request,
                       Scratch& s) {
  const double maximum = row.range.maximum;
  const double temperature = std::max(request.temperature, kLeastTemperature);
  const float reach = static_cast<float>(maximum - kReach * temperature);
  float least = reach;
  if (request.min_p > 0.0) {
    // p >= min_p * p_max, with the softmax taken away on both sides (Nguyen et al., Min-p, 2024).
    const double floor = maximum + request.temperature * std::log(request.min_p);
    least = std::max(reach, static_cast<float>(floor));
  }
  if (request.top_n_sigma > 0.0) {
    least = std::max(least, sigma_floor(kernels, row, request.top_n_sigma));
  }
  const bool is_weighed = request.typical_p < 1.0 || request.xtc_threshold <= 1.0;
  if (!request.has_top_k && is_weighed) {
    return draw_thinned(kernels, row, gather(kernels, row, least, 1, s), by, request, s);
  }
  if (!request.has_top_k) {
    const bool has_floor = request.min_p > 0.0 || request.top_n_sigma > 0.0;
    return draw_above(kernels, row, least, has_floor, by, request, s);
  }
  const int64_t size = std::min(request.top_k, row.count);
  least = std::max(least, reached_by(kernels, row, size, s));
  const Candidates kept = largest(kernels, gather(kernels, row, least, 1, s), size, s);
  if (is_weighed) return draw_thinned(kernels, row, kept, by, request, s);
  const Range range = kernels.scan(kept.values, kept.size);
  const Descent descent(kernels, kept, range, by, s);
  return draw_nucleus(descent, request, descent.total());
}

// From values that were looked at; the result is a place in them.
int64_t draw(const Kernels& kernels, const Row& row, const Request& request, Scratch& s) {
  if (request.greedy) return first_of(row, row.range.maximum);
  if (is_full(request)) {
    Race race(request, nullptr);
    race.run(row);
    return race.token();
  }
  return draw_truncated(kernels, row, {row.range.maximum, scale_of(request)}, request, s);
}

// Draws from all of a row that may come, or its likeliest; false: nothing of that is finite.
bool draw_among(const Kernels& kernels, const Row& row, const uint32_t* mask, Request& request) {
  if (request.greedy) {
    const LikeliestAllowed likeliest(kernels, row, mask);
    request.token = likeliest.place();
    return std::isfinite(likeliest.value());
  }
  Race race(request, mask);
  race.run(row);
  request.token = race.token();
  return race.has_found();
}

// Changes, draws from what is allowed, and puts back; false: there is nothing finite among it.
bool draw_changed(const Batch& batch, float* logits, Request& request, Scratch& s) {
  const Changed changed(request, logits, s.undo);
  const Kernels& kernels = *batch.kernels;
  const Candidates all = allowed(kernels, request, logits, batch.vocab, s.allowed);
  const Row row = look_at(kernels, all, rows::kNoSums, s.changed);
  if (!is_finite(row.range)) return false;
  if (has_mu(request)) {
    const Surprising drawn = draw_mirostat(kernels, row, request, batch.vocab, s);
    request.token = all.place(drawn.place);
    request.surprise = drawn.surprise;
    return true;
  }
  const Request own = adapted(kernels, row, request);
  if (is_near(own) && !own.greedy) {
    const Surprising drawn = draw_near(kernels, row, own, s);
    request.token = all.place(drawn.place);
    request.surprise = drawn.surprise;
    return true;
  }
  if (all.places && is_full(own)) {
    Race race(own, nullptr);
    race.run(all);
    request.token = race.token();
    return true;
  }
  request.token = all.place(draw(kernels, row, own, s));
  return true;
}

// The likeliest tokens, by the softmax of the row as given.
void report_top(const Batch& batch, const Row& row, double log_sum, const Request& request,
                Scratch& s) {
  const Kernels& kernels = *batch.kernels;
  const float least = reached_by(kernels, row, request.num_top, s);
  const Candidates head = gather(kernels, row, least, request.num_top, s);
  const Candidates top = sorted(largest(kernels, head, request.num_top, s), s);
  for (int64_t i = 0; i < top.size; i++) {
    batch.top_ids[request.top_begin + i] = top.places[i];
    batch.top_logprobs[request.top_begin + i] = static_cast<double>(top.values[i]) - log_sum;
  }
}

// A group anew, whose largest value may have become smaller, and what that says of its chunk.
void look_again(const Kernels& kernels, const Row& row, int64_t group) {
  const int64_t first = group * kGroup, count = std::min(kGroup, row.count - first);
  row.summary.groups[group] = kernels.scan(row.values + first, count).maximum;
  const int64_t chunk = group / kGroups;
  const float* groups = row.summary.groups + chunk * kGroups;
  row.summary.largest[chunk] = *std::max_element(groups, groups + kGroups);
}

// What a row that was looked at is since some of its values changed. Only the groups of these can
// have another maximum, and seldom one of these was the largest of its group. `least` is not kept
// up: the row's range is.
Row look_at_changes(const Kernels& kernels, const Row& given, const float* logits, Scratch& s) {
  const int64_t chunks = num_chunks(given.count);
  Row row{logits, given.count, given.range, summary_in(s.changed, given.count)};
  std::copy_n(given.summary.groups, chunks * kGroups, row.summary.groups);
  std::copy_n(given.summary.largest, chunks, row.summary.largest);
  *row.summary.scale = rows::kNoSums;
  s.stale.clear();
  for (const Undo& old : s.undo) {
    const int64_t chunk = old.token / kChunk, group = old.token / kGroup;
    const float value = logits[old.token];
    row.range.has_nan |= std::isnan(value);
    row.range.minimum = std::min(row.range.minimum, value);
    if (old.value == given.summary.groups[group]) s.stale.push_back(group);
    float& most = row.summary.groups[group];
    most = std::max(most, value);
    row.summary.largest[chunk] = std::max(row.summary.largest[chunk], value);
  }
  for (const int64_t group : s.stale) look_again(kernels, row, group);
  row.range.maximum = kernels.scan(row.summary.largest, chunks).maximum;
  return row;
}

// As draw_changed from a row that was looked at. With a mask, what is drawn is the likeliest token or
// from all that may come.
bool draw_patched(const Batch& batch, const Row& given, float* logits, Request& request,
                  Scratch& s) {
  const Changed changed(request, logits, s.undo);
  const Row row = look_at_changes(*batch.kernels, given, logits, s);
  if (!is_finite(row.range)) return false;
  if (request.mask) return draw_among(*batch.kernels, row, request.mask, request);
  request.token = draw(*batch.kernels, row, request, s);
  return true;
}

// The row as it is given, if its summary came with it, and it is finite; false: it is not known.
bool find_known(const Batch& batch, const float* logits, int64_t index, Row& row) {
  if (!batch.summaries) return false;
  float* const memory = batch.summaries + index * batch.summary_stride;
  const rows::Summary summary = rows::summary_at(memory, batch.vocab);
  if (*summary.scale == rows::kNothing) return false;
  row = row_of(*batch.kernels, {logits, nullptr, batch.vocab}, summary);
  return is_finite(row.range);
}

bool draw_known(const Batch& batch, const Row& given, float* logits, Request& request,
                Scratch& s) {
  if (request.allowed || request.adapting != kFixed ||
      (request.mask && !request.greedy && !is_full(request)))
    return draw_changed(batch, logits, request, s);
  if (has_changes(request)) return draw_patched(batch, given, logits, request, s);
  if (request.mask) return draw_among(*batch.kernels, given, request.mask, request);
  request.token = draw(*batch.kernels, given, request, s);
  return true;
}

// Draws and reports, by the row as it is given.
bool draw_reporting(const Batch& batch, const Row& row, float* logits, Request& request,
                    Scratch& s) {
  const Kernels& kernels = *batch.kernels;
  const double total = total_of(kernels, row, static_cast<float>(kLog2E), s);
  const double log_sum = static_cast<double>(row.range.maximum) + std::log(total);
  if (request.num_top) report_top(batch, row, log_sum, request, s);
  if (!request.has_token && !draw_known(batch, row, logits, request, s)) return false;
  request.rank = kernels.before(logits, batch.vocab, row.summary.groups, request.token) + 1;
  request.logprob = static_cast<double>(logits[request.token]) - log_sum;
  return true;
}

// False: the row is not finite.
bool sample(const Batch& batch, float* logits, int64_t index, Request& request, Scratch& s) {
  Row row;
  const bool is_known = find_known(batch, logits, index, row);
  if (!request.has_logprobs) {
    if (request.has_token) return true;
    return is_known ? draw_known(batch, row, logits, request, s)
                    : draw_changed(batch, logits, request, s);
  }
  if (!is_known) {
    const Candidates given{logits, nullptr, batch.vocab};
    row = look_at(*batch.kernels, given, static_cast<float>(kLog2E), s.given);
  }
  return is_finite(row.range) && draw_reporting(batch, row, logits, request, s);
}

}  // namespace

void sample_row(const Batch& batch, float* logits, Request& request) {
  if (!is_valid(request, batch.vocab)) {
    request.status = kBadToken;
    return;
  }
  Scratch& s = scratch();
  const int64_t index = &request - batch.requests, next = index + batch.num_threads;
  s.ahead = next < batch.num_rows ? batch.logits + next * batch.stride : nullptr;
  const bool finite = sample(batch, logits, index, request, s);
  request.status = finite ? kDrawn : kNotFinite;
}

}  // namespace onnxport
