// One row of logits: changed, narrowed down, drawn from, put back, and its log probabilities.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "likeliest.h"
#include "request.h"

namespace onnxport {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLeastTemperature = 1e-20;  // a smaller one has no inverse in float32
constexpr double kHead = 10.0;   // exp(-10): tokens that are looked at first for a nucleus
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

// The logits of the tokens that are allowed, ascending.
Candidates narrow(const Request& request, const float* logits, int64_t vocab, Shelf& shelf) {
  shelf.make_room(request.allowed ? request.num_allowed : vocab);
  float* values = shelf.values.data();
  int32_t* places = shelf.places.data();
  const auto take = [&](int64_t token) {
    *values++ = logits[token];
    *places++ = static_cast<int32_t>(token);
  };
  if (request.allowed) {
    for (int64_t i = 0; i < request.num_allowed; i++) {
      const int64_t token = request.allowed[i];
      if (!request.mask || request.mask[token / 32] >> (token % 32) & 1) take(token);
    }
    return shelf.first(values - shelf.values.data());
  }
  for (int64_t first = 0; first < vocab; first += 32) {
    const int64_t count = std::min<int64_t>(32, vocab - first);
    uint32_t bits = request.mask[first / 32];
    if (bits == 0xffffffffu) {
      values = std::copy_n(logits + first, count, values);
      std::iota(places, places + count, static_cast<int32_t>(first));
      places += count;
      continue;
    }
    for (; bits; bits &= bits - 1) {
      const int64_t token = first + __builtin_ctz(bits);
      if (token < vocab) take(token);
    }
  }
  return shelf.first(values - shelf.values.data());
}

Row look_at(const Kernels& kernels, const float* values, int64_t count, Scratch& s) {
  s.group_maxima.resize(static_cast<size_t>(num_chunks(count) * kChunkGroups));
  const Range range = kernels.scan(values, count, s.group_maxima.data());
  return {values, count, range, s.group_maxima.data()};
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

// The sum of all weights; those of the chunks stay in sums.
double total_of(const Kernels& kernels, const Row& row, Weighing by, Scratch& s) {
  s.sums.resize(static_cast<size_t>(num_chunks(row.count)));
  kernels.sums(row.values, row.count, by, s.sums.data());
  double total = 0.0;
  for (const double mass : s.sums) total += mass;
  return total;
}

// From the whole row, in its order: the chunk at which the sum passes the number, then the place.
int64_t draw_full(const Kernels& kernels, const Row& row, Weighing by, double uniform, Scratch& s) {
  const double target = uniform * total_of(kernels, row, by, s);
  double before = 0.0, sum = 0.0;
  int64_t chunk = 0;
  for (int64_t i = 0; i < num_chunks(row.count) && sum <= target; i++) {
    if (s.sums[static_cast<size_t>(i)] == 0.0) continue;
    chunk = i;
    before = sum;
    sum += s.sums[static_cast<size_t>(i)];
  }
  float weights[kChunk];
  const int64_t first = chunk * kChunk, count = std::min(kChunk, row.count - first);
  kernels.weigh(row.values + first, count, by, weights);
  int64_t last = 0;  // by rounding the sum may pass nowhere: then the last possible token is meant
  sum = before;
  for (int64_t i = 0; i < count; i++) {
    if (weights[i] == 0.f) continue;
    last = i;
    sum += weights[i];
    if (sum > target) break;
  }
  return first + last;
}

int64_t draw_among(const Descent& descent, const Request& request, double total) {
  double kept = descent.total();
  int32_t last = -1;
  if (request.top_p < 1.0) {
    // A token is kept if what comes before it has not reached top_p, so "passes" includes equality.
    const Descent::Stop cut = descent.find(std::nextafter(request.top_p * total, 0.0));
    kept = cut.sum;
    last = cut.place;
  }
  const Descent::Stop stop = descent.find(request.uniform * kept);
  return request.top_p < 1.0 && stop.sum > kept ? last : stop.place;
}

// From what min_p, top_k and top_p leave, the largest first.
int64_t draw_truncated(const Kernels& kernels, const Row& row, Weighing by, const Request& request,
                       Scratch& s) {
  const double maximum = row.range.maximum;
  const double temperature = std::max(request.temperature, kLeastTemperature);
  const float reach = static_cast<float>(maximum - kReach * temperature);
  float floor = reach;
  if (request.min_p > 0.0) {
    // p >= min_p * p_max, with the softmax taken away on both sides (Nguyen et al., Min-p, 2024).
    const double least = maximum + request.temperature * std::log(request.min_p);
    floor = std::max(floor, static_cast<float>(least));
  }
  if (request.has_top_k) {
    floor = std::max(floor, reached_by(row, std::min(request.top_k, row.count), s));
    const Candidates head = gather(kernels, row, floor, s);
    const Descent descent(kernels, largest(kernels, head, request.top_k, s), by, s);
    return draw_among(descent, request, descent.total());
  }
  if (request.min_p > 0.0) {
    const Descent descent(kernels, gather(kernels, row, floor, s), by, s);
    return draw_among(descent, request, descent.total());
  }
  const double total = total_of(kernels, row, by, s);
  const float near = std::max(reach, static_cast<float>(maximum - kHead * temperature));
  const Descent first(kernels, gather(kernels, row, near, s), by, s);
  if (first.total() >= request.top_p * total) return draw_among(first, request, total);
  return draw_among(Descent(kernels, gather(kernels, row, reach, s), by, s), request, total);
}

int64_t draw(const Kernels& kernels, const Row& row, const Request& request, Scratch& s) {
  if (request.greedy) return first_of(row, row.range.maximum);
  const double inverse = kLog2E / std::max(request.temperature, kLeastTemperature);
  const Weighing by{row.range.maximum, static_cast<float>(inverse)};
  const bool truncated = request.has_top_k || request.min_p > 0.0 || request.top_p < 1.0;
  return truncated ? draw_truncated(kernels, row, by, request, s)
                   : draw_full(kernels, row, by, request.uniform, s);
}

// Changes, draws and puts back; false: there is nothing finite to draw from.
bool draw_changed(const Batch& batch, float* logits, Request& request, Scratch& s) {
  const Changed changed(request, logits, s.undo);
  Candidates few{logits, nullptr, batch.vocab};
  if (request.allowed || request.mask) few = narrow(request, logits, batch.vocab, s.allowed);
  const Row row = look_at(*batch.kernels, few.values, few.size, s);
  if (!is_finite(row.range)) return false;
  request.token = few.place(draw(*batch.kernels, row, request, s));
  return true;
}

// Log probabilities by the softmax of the row as given.
bool report(const Batch& batch, const float* logits, Request& request, Scratch& s) {
  const Kernels& kernels = *batch.kernels;
  const Row row = look_at(kernels, logits, batch.vocab, s);
  if (!is_finite(row.range)) return false;
  const double total = total_of(kernels, row, {row.range.maximum, static_cast<float>(kLog2E)}, s);
  const double log_sum = static_cast<double>(row.range.maximum) + std::log(total);
  const float value = logits[request.token];
  int64_t larger, equal, unused;
  kernels.rank(logits, batch.vocab, value, &larger, &unused);
  kernels.rank(logits, request.token, value, &unused, &equal);  // of equals, those of lower ids
  request.rank = larger + equal + 1;
  request.logprob = static_cast<double>(value) - log_sum;
  if (!request.num_top) return true;
  const Candidates head = gather(kernels, row, reached_by(row, request.num_top, s), s);
  const Candidates top = sorted(largest(kernels, head, request.num_top, s), s);
  for (int64_t i = 0; i < top.size; i++) {
    batch.top_ids[request.top_begin + i] = top.places[i];
    batch.top_logprobs[request.top_begin + i] = static_cast<double>(top.values[i]) - log_sum;
  }
  return true;
}

}  // namespace

void sample_row(const Batch& batch, float* logits, Request& request) {
  if (!is_valid(request, batch.vocab)) {
    request.status = kBadToken;
    return;
  }
  Scratch& s = scratch();
  bool finite = request.has_token || draw_changed(batch, logits, request, s);
  if (finite && request.has_logprobs) finite = report(batch, logits, request, s);
  request.status = finite ? kDrawn : kNotFinite;
}

}  // namespace onnxport
