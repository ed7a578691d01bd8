// One row of logits: changed, narrowed down, drawn from, put back, and its log probabilities.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "nucleus.h"

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLeastTemperature = 1e-20;  // a smaller one has no inverse in float32
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

Row look_at(const Kernels& kernels, const Candidates& all, std::vector<float>& group_maxima) {
  group_maxima.resize(static_cast<size_t>(num_chunks(all.size) * kChunkGroups));
  const Range range = kernels.scan(all.values, all.size, group_maxima.data());
  return {all.values, all.size, range, group_maxima.data()};
}

// The same, with the sums of the chunks' weights in scratch.sums, each for the largest value up to
// there, in scratch.chunk_maxima: in one pass, while the values are in the nearest cache.
Row look_weighing(const Kernels& kernels, const Candidates& all, float scale,
                  std::vector<float>& group_maxima, Scratch& s) {
  const size_t chunks = static_cast<size_t>(num_chunks(all.size));
  group_maxima.resize(chunks * kChunkGroups);
  s.chunk_maxima.resize(chunks);
  s.sums.resize(chunks);
  const Range range = kernels.scan_weighing(all.values, all.size, scale, group_maxima.data(),
                                            s.chunk_maxima.data(), s.sums.data());
  return {all.values, all.size, range, group_maxima.data()};
}

// What a weight for that maximum has to be multiplied by to be one for the row's.
double rescaling(const Row& row, float maximum, float scale) {
  const double difference = static_cast<double>(maximum) - static_cast<double>(row.range.maximum);
  return std::exp2(difference * static_cast<double>(scale));
}

// Makes all sums those of weights for the row's maximum; returns their sum.
double rescale(const Row& row, float scale, Scratch& s) {
  float maximum = row.range.maximum;
  double factor = 1.0, total = 0.0;
  for (size_t i = 0; i < s.sums.size(); i++) {
    if (s.chunk_maxima[i] != maximum) {
      maximum = s.chunk_maxima[i];
      factor = rescaling(row, maximum, scale);
    }
    s.sums[i] *= factor;
    total += s.sums[i];
  }
  return total;
}

bool is_finite(const Range& range) { return !range.has_nan && std::isfinite(range.maximum); }

int64_t first_of(const Row& row, float value) {
  const float* groups = row.group_maxima;
  const int64_t count = num_chunks(row.count) * kChunkGroups;
  const int64_t group = std::find(groups, groups + count, value) - groups;
  int64_t place = group / kChunkGroups * kChunk;
  while (row.values[place] != value) place++;
  return place;
}

// From the whole row, in its order: the chunk at which the sum passes the number, then the place.
int64_t draw_full(const Kernels& kernels, const Row& row, float scale, double uniform,
                  Scratch& s) {
  const double target = uniform * rescale(row, scale, s);
  double before = 0.0, sum = 0.0;
  int64_t chunk = 0;
  for (int64_t i = 0; i < num_chunks(row.count) && sum <= target; i++) {
    if (s.sums[static_cast<size_t>(i)] == 0.0) continue;
    chunk = i;
    before = sum;
    sum += s.sums[static_cast<size_t>(i)];
  }
  float weights[kChunk];
  const float maximum = s.chunk_maxima[static_cast<size_t>(chunk)];
  const double factor = rescaling(row, maximum, scale);
  const int64_t first = chunk * kChunk, count = std::min(kChunk, row.count - first);
  kernels.weigh(row.values + first, count, {maximum, scale}, weights);
  int64_t last = 0;  // by rounding the sum may pass nowhere: then the last possible token is meant
  sum = before;
  for (int64_t i = 0; i < count; i++) {
    if (weights[i] == 0.f) continue;
    last = i;
    sum += weights[i] * factor;
    if (sum > target) break;
  }
  return first + last;
}

// From what min_p, top_k and top_p leave, the largest first.
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
  if (!request.has_top_k) return draw_above(kernels, row, least, by, request, s);
  least = std::max(least, reached_by(kernels, row, std::min(request.top_k, row.count), s));
  const Candidates kept = largest(kernels, gather(kernels, row, least, s), request.top_k, s);
  const Range range = kernels.scan(kept.values, kept.size, nullptr);
  const Descent descent(kernels, kept, range, by, s);
  return draw_nucleus(descent, request, descent.total());
}

float scale_of(const Request& request) {
  return static_cast<float>(kLog2E / std::max(request.temperature, kLeastTemperature));
}

bool is_full(const Request& request) {
  return !request.greedy && !request.has_top_k && request.min_p == 0.0 && request.top_p == 1.0;
}

// From values that were looked at but not weighed; the result is a place in them.
int64_t draw(const Kernels& kernels, const Row& row, const Request& request, Scratch& s) {
  if (request.greedy) return first_of(row, row.range.maximum);
  return draw_truncated(kernels, row, {row.range.maximum, scale_of(request)}, request, s);
}

// Draws from what is allowed; false: there is nothing finite among it.
bool draw_allowed(const Kernels& kernels, const Candidates& all, Request& request, Scratch& s) {
  const bool full = is_full(request);
  const float scale = scale_of(request);
  const Row row = full ? look_weighing(kernels, all, scale, s.group_maxima, s)
                       : look_at(kernels, all, s.group_maxima);
  if (!is_finite(row.range)) return false;
  request.token = all.place(full ? draw_full(kernels, row, scale, request.uniform, s)
                                 : draw(kernels, row, request, s));
  return true;
}

bool has_changes(const Request& request) {
  return request.num_biased || request.num_banned || request.num_seen;
}

// Changes, draws and puts back.
bool draw_changed(const Batch& batch, float* logits, Request& request, Scratch& s) {
  const Changed changed(request, logits, s.undo);
  const Kernels& kernels = *batch.kernels;
  return draw_allowed(kernels, allowed(kernels, request, logits, batch.vocab, s.allowed), request,
                      s);
}

// The likeliest tokens, by the softmax of the row as given.
void report_top(const Batch& batch, const Row& row, double log_sum, const Request& request,
                Scratch& s) {
  const Kernels& kernels = *batch.kernels;
  const float least = reached_by(kernels, row, request.num_top, s);
  const Candidates head = gather(kernels, row, least, s);
  const Candidates top = sorted(largest(kernels, head, request.num_top, s), s);
  for (int64_t i = 0; i < top.size; i++) {
    batch.top_ids[request.top_begin + i] = top.places[i];
    batch.top_logprobs[request.top_begin + i] = static_cast<double>(top.values[i]) - log_sum;
  }
}

// The groups of one chunk anew; they have to be those of the values as they are now.
void look_again(const Kernels& kernels, const Row& row, int64_t chunk, float* group_maxima) {
  const int64_t first = chunk * kChunk, count = std::min(kChunk, row.count - first);
  kernels.scan(row.values + first, count, group_maxima + chunk * kChunkGroups);
}

// What a row that was looked at is since some of its values changed. Only the groups of these can
// have another maximum, and seldom one of these was the largest of its group.
Row look_at_changes(const Kernels& kernels, const Row& given, const float* logits, Scratch& s) {
  const int64_t groups = num_chunks(given.count) * kChunkGroups;
  s.group_maxima.assign(given.group_maxima, given.group_maxima + groups);
  s.stale.assign(static_cast<size_t>(num_chunks(given.count)), false);
  float* maxima = s.group_maxima.data();
  Row row{logits, given.count, given.range, maxima};
  for (const Undo& old : s.undo) {
    const int64_t chunk = old.token / kChunk;
    const int64_t group = chunk * kChunkGroups + old.token % kChunkGroups;
    const float value = logits[old.token];
    row.range.has_nan |= std::isnan(value);
    row.range.minimum = std::min(row.range.minimum, value);
    if (old.value == given.group_maxima[group]) s.stale[static_cast<size_t>(chunk)] = true;
    maxima[group] = std::max(maxima[group], value);
  }
  for (int64_t chunk = 0; chunk < num_chunks(given.count); chunk++) {
    if (s.stale[static_cast<size_t>(chunk)]) look_again(kernels, row, chunk, maxima);
  }
  row.range.maximum = kernels.scan(maxima, groups, nullptr).maximum;
  return row;
}

// As draw_changed for a row that was looked at.
bool draw_patched(const Batch& batch, const Row& given, float* logits, Request& request,
                  Scratch& s) {
  const Changed changed(request, logits, s.undo);
  const Row row = look_at_changes(*batch.kernels, given, logits, s);
  if (!is_finite(row.range)) return false;
  request.token = draw(*batch.kernels, row, request, s);
  return true;
}

// Draws and reports. What the row says as it is given comes first: that pass brings it near.
bool draw_reporting(const Batch& batch, float* logits, Request& request, Scratch& s) {
  const Kernels& kernels = *batch.kernels;
  const Candidates given{logits, nullptr, batch.vocab};
  const float scale = static_cast<float>(kLog2E);
  const Row row = look_weighing(kernels, given, scale, s.given_groups, s);
  if (!is_finite(row.range)) return false;
  const double total = rescale(row, scale, s);
  const double log_sum = static_cast<double>(row.range.maximum) + std::log(total);
  if (request.num_top) report_top(batch, row, log_sum, request, s);
  if (request.has_token) {
    // Nothing to draw.
  } else if (request.allowed || request.mask || is_full(request)) {
    if (!draw_changed(batch, logits, request, s)) return false;
  } else if (has_changes(request)) {
    if (!draw_patched(batch, row, logits, request, s)) return false;
  } else {
    request.token = draw(kernels, row, request, s);
  }
  request.rank = kernels.before(logits, batch.vocab, row.group_maxima, request.token) + 1;
  request.logprob = static_cast<double>(logits[request.token]) - log_sum;
  return true;
}

}  // namespace

void sample_row(const Batch& batch, float* logits, Request& request) {
  if (!is_valid(request, batch.vocab)) {
    request.status = kBadToken;
    return;
  }
  Scratch& s = scratch();
  const int64_t next = &request - batch.requests + batch.num_threads;
  s.ahead = next < batch.num_rows ? batch.logits + next * batch.stride : nullptr;
  bool finite = true;
  if (request.has_logprobs) {
    finite = draw_reporting(batch, logits, request, s);
  } else if (!request.has_token) {
    finite = draw_changed(batch, logits, request, s);
  }
  request.status = finite ? kDrawn : kNotFinite;
}

}  // namespace onnxport
