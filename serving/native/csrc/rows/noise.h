// A row's random numbers, one for each token, so that a token drawn with its probability is the one
// with the largest of all sums:
//
//   x / temperature - log(E),    E exponential, of each token by itself
//
// for the token whose exponential clock, of the rate exp(x / temperature), rings first is each token
// with the probability of its rate (the Gumbel-max trick, for -log(E) is a Gumbel variable). So
// drawing asks which tokens may have the largest sum, as looking for the likeliest does, and not for
// the weights of all.
//
// The numbers of a group of 64 tokens begin with the least one, which is a 64th of an exponential
// variable and any token's alike. The others are that and an exponential variable each, as these
// have no memory. So most groups can be told by their largest value and one random number to have no
// sum that is large enough, and by a table of what their logarithms are at most.
//
// graphs/noise.py has the same numbers.
#pragma once

#include <math.h>
#include <stdint.h>

namespace onnxport::rows {

class Noise {
 public:
  static constexpr int64_t kTokens = 64;  // of a group

  // Of a row with a number in [0, 1), of which 53 bits count.
  explicit Noise(double uniform = 0.0) {
    const uint64_t number = static_cast<uint64_t>(uniform * 0x1p53);
    groups_ = mix(number + kGamma);
    tokens_ = mix(number + 2 * kGamma);
  }

  // -log(E) of a token.
  double of(int64_t token) const {
    const uint64_t group = group_bits(token / kTokens);
    const double least = exponential(group) / kTokens;
    if (static_cast<int64_t>(group % kTokens) == token % kTokens) return -log(least);
    return -log(least + exponential(token_bits(token)));
  }

  // No less than that of any token of a group, and of a token; seldom much more.
  double most_of_group(int64_t group) const { return most_of_bits(group_bits(group)) + kLog64; }
  double most_of(int64_t token) const {
    const uint64_t group = group_bits(token / kTokens);
    const double most = most_of_bits(group) + kLog64;
    if (static_cast<int64_t>(group % kTokens) == token % kTokens) return most;
    const double own = most_of_bits(token_bits(token));
    return own < most ? own : most;
  }

 private:
  static constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;
  static constexpr double kLog64 = 4.1588830833596724;
  static constexpr double kSlack = 1e-9;  // more than rounding is
  static constexpr int kCells = 1024;

  // The finalizer of SplitMix64 (Steele, Lea, Flood, 2014).
  static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return value ^ (value >> 31);
  }

  uint64_t group_bits(int64_t group) const {
    return mix(groups_ + static_cast<uint64_t>(group + 1) * kGamma);
  }
  uint64_t token_bits(int64_t token) const {
    return mix(tokens_ + static_cast<uint64_t>(token + 1) * kGamma);
  }

  // By its first 53 bits, never 0.
  static double exponential(uint64_t bits) {
    return -log((static_cast<double>(bits >> 11) + 0.5) * 0x1p-53);
  }

  // No less than -log of exponential: by the first ten bits, or itself where these are all set.
  static double most_of_bits(uint64_t bits) {
    const uint64_t cell = bits >> 54;
    return cell < kCells - 1 ? table()[cell] : kSlack - log(exponential(bits));
  }
  static const double* table() {
    static const Table made;
    return made.most;
  }
  struct Table {
    double most[kCells - 1];
    Table() {
      for (int i = 0; i < kCells - 1; i++) most[i] = kSlack - log(-log((i + 1.0) / kCells));
    }
  };

  uint64_t groups_, tokens_;
};

}  // namespace onnxport::rows
