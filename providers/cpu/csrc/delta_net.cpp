// Divides gated delta nets into tasks: tokens, whose keys and queries are made ready, then rows of
// a head's state, which take all of a sequence's tokens one after the other.
#include "delta_net.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "product.h"
#include "tensor.h"

namespace onnxport {
namespace {

constexpr int64_t kMostTokens = 512;  // that are made ready at once
constexpr int64_t kTaskTokens = 8, kTaskRows = 32;

// New tokens of a sequence, counted among those that are made ready.
struct Piece {
  int64_t sequence, begin, end;
  bool is_first;  // of the sequence's
};

struct Memory {
  Buffer keys, products, gates;
  std::vector<Piece> pieces;
};

float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

struct Run {
  const Kernels& kernels;
  const DeltaNet& net;
  std::vector<Piece>& pieces;
  DeltaTokens tokens;
  int64_t groups;  // of rows, of each head

  Run(const DeltaNet& call, Memory& memory)
      : kernels(*active_kernels()),
        net(call),
        pieces(memory.pieces),
        groups(ceil_div(call.value_size, kTaskRows)) {
    const int64_t count = std::min(kMostTokens, call.slots.num_tokens);
    const int64_t heads = call.key_heads * count, gates = call.value_heads * count;
    tokens.keys =
        memory.keys.reserve<float>(static_cast<size_t>(heads * 2 * padded(call.key_size)));
    tokens.products = memory.products.reserve<float>(static_cast<size_t>(heads));
    const int64_t decays = call.has_channels ? gates * padded(call.key_size) : gates;
    tokens.decays = memory.gates.reserve<float>(static_cast<size_t>(decays + gates));
    tokens.betas = tokens.decays + decays;
  }

  // Finds the sequences of the tokens [begin, end), and those of no tokens that come with them.
  void divide(int64_t begin, int64_t end) {
    tokens.first = begin;
    tokens.count = end - begin;
    pieces.clear();
    const int32_t* cumulative = net.slots.cumulative_lengths;
    for (int64_t i = 0; i < net.slots.batch; i++) {
      const int64_t first = cumulative[i], last = cumulative[i + 1];
      const int64_t from = std::max(first, begin), to = std::min(last, end);
      const bool is_empty =
          first == last && first >= begin && (first < end || end == net.slots.num_tokens);
      if (from < to || is_empty) pieces.push_back({i, from - begin, to - begin, from == first});
    }
  }

  void prepare(int64_t index) const {
    const int64_t begin = index * kTaskTokens, end = std::min(begin + kTaskTokens, tokens.count);
    kernels.prepare_delta(net, tokens, begin, end);
    for (int64_t token = begin; token < end; token++) {
      const int64_t from = (tokens.first + token) * net.value_heads;
      const int64_t to = token * net.value_heads;
      for (int64_t head = 0; head < net.value_heads; head++) {
        float step = 1.f;
        if (!net.has_channels) {
          float log = net.decay[from + head];
          if (net.a_log) {
            const float raw = softplus(log + net.dt_bias[head]);
            log = -std::exp(net.a_log[head]) * raw;
            if (net.has_steps) step = raw;
          }
          tokens.decays[to + head] = std::exp(log);
        }
        if (!net.has_delta_rule) {
          tokens.betas[to + head] = step;
          continue;
        }
        const float beta = net.beta[from + head];
        tokens.betas[to + head] = net.has_sigmoid ? 1.f / (1.f + std::exp(-beta)) : beta;
      }
    }
  }

  // The decays of a token and head: as many exponentials as a key has channels.
  void decay_channels(int64_t index) const {
    const int64_t head = index % net.value_heads, size = net.key_size;
    const float* given = net.decay + (tokens.first * net.value_heads + index) * size;
    float* decays = tokens.decays + index * padded(size);
    const float rate = net.a_log ? std::exp(net.a_log[head]) : 1.f;
    for (int64_t i = 0; i < size; i++) {
      const float log =
          net.a_log ? -rate * softplus(given[i] + net.dt_bias[head * size + i]) : given[i];
      decays[i] = std::exp(log);
    }
    std::fill(decays + size, decays + padded(size), 0.f);
  }

  void update(int64_t index) const {
    const int64_t heads = net.value_heads * groups;
    const Piece& piece = pieces[static_cast<size_t>(index / heads)];
    const int64_t head = index % heads / groups, row = index % groups * kTaskRows;
    const int32_t to = net.slots.writes[piece.sequence];
    const int32_t from = piece.is_first ? net.slots.reads[piece.sequence] : to;
    const auto rows_in = [&](int32_t slot) {
      return net.pool + ((slot * net.value_heads + head) * net.value_size + row) * net.key_size;
    };
    kernels.update_delta(net, tokens,
                         {head, row, std::min(row + kTaskRows, net.value_size), piece.begin,
                          piece.end, rows_in(from), rows_in(to)});
  }
};

int run_tokens(Run& run, ParallelFor parallel_for, void* context) {
  const int result = run_tasks(
      ceil_div(run.tokens.count, kTaskTokens),
      [](void* argument, size_t index) {
        static_cast<const Run*>(argument)->prepare(static_cast<int64_t>(index));
      },
      &run, parallel_for, context);
  if (result != 0) return result;
  if (run.net.has_channels) {
    const int failed = run_tasks(
        run.tokens.count * run.net.value_heads,
        [](void* argument, size_t index) {
          static_cast<const Run*>(argument)->decay_channels(static_cast<int64_t>(index));
        },
        &run, parallel_for, context);
    if (failed != 0) return failed;
  }
  return run_tasks(
      static_cast<int64_t>(run.pieces.size()) * run.net.value_heads * run.groups,
      [](void* argument, size_t index) {
        static_cast<const Run*>(argument)->update(static_cast<int64_t>(index));
      },
      &run, parallel_for, context);
}

}  // namespace

void check_sizes(const DeltaNet& net) {
  using Long = long long;
  if (net.key_size < 1 || net.key_size > kMostKeySize)
    refuse("a key must have 1 to %d numbers, found %lld", kMostKeySize, Long{net.key_size});
  if (net.value_size < 1) refuse("a value must have numbers, found %lld", Long{net.value_size});
  if (net.key_heads < 1 || net.value_heads < 1 || net.value_heads % net.key_heads)
    refuse("value heads must be a positive multiple of key heads, found %lld and %lld",
           Long{net.value_heads}, Long{net.key_heads});
}

int run_delta_net(const DeltaNet& net, ParallelFor parallel_for, void* context) {
  thread_local Memory memory;
  Run run(net, memory);
  int64_t begin = 0;
  do {
    const int64_t end = std::min(begin + kMostTokens, net.slots.num_tokens);
    run.divide(begin, end);
    if (const int result = run_tokens(run, parallel_for, context)) return result;
    begin = end;
  } while (begin < net.slots.num_tokens);
  return 0;
}

}  // namespace onnxport
