// What is asked for, as the caller lays it out in memory.
#pragma once

#include <stdint.h>

#include "kernels.h"

namespace onnxport {

enum Status : int32_t {
  kDrawn = 0,
  kNotFinite = 1,   // NaN, or no finite maximum
  kBadToken = 2,    // an id that the vocabulary does not have
  kOutOfMemory = 3,
};

// What of a row's sampling depends on all of its logits.
enum Adapting : int32_t {
  kFixed = 0,       // nothing
  kMirostat1 = 1,   // how many tokens are left
  kMirostat2 = 2,   // how probable those that are left have to be
  kDynamic = 3,     // the temperature
  kNear = 4,        // how near each probability is to the target of adaptive-p
  kDynamicNear = 5, // both
};

// How one row is sampled, and what came of it. Pointers may be null where their number is 0.
struct Request {
  // What stays the same from step to step.
  double temperature, min_p, top_p;
  double top_n_sigma;    // 0: off
  double typical_p;      // 1: off
  double xtc_threshold;  // above 1: off
  double least_temperature, exponent;  // if kDynamic; `temperature` is the most
  int64_t top_k;    // if has_top_k
  int64_t num_top;  // how many of the likeliest tokens are reported, at most the vocabulary
  int32_t greedy, has_top_k;
  int32_t has_token;     // nothing is drawn
  int32_t has_logprobs;  // those of `token` are asked for
  int32_t is_thinned;    // whether any of the three above is on
  int32_t adapting;      // see Adapting
  // What changes in the logits.
  const int64_t* bias_ids;
  const float* bias;
  const int64_t* banned;
  const int64_t* seen;
  const float* counts;
  const int64_t* allowed;  // ascending; null: all
  int64_t num_biased, num_banned, num_seen, num_allowed;
  float repetition, presence, frequency, unused;
  // What is of this step.
  const uint32_t* mask;  // bit i % 32 of word i / 32 allows token i; null: all
  double uniform;
  double mu;          // how much a token may surprise, in bits, if kMirostat1 or kMirostat2; the
                      // probability that is aimed at if kNear or kDynamicNear
  int64_t token;      // in if has_token, out otherwise
  int64_t top_begin;  // where the likeliest begin in the batch's top_ids and top_logprobs
  // Results.
  int64_t rank;
  double logprob;
  double surprise;  // of the token among those that were left, in bits, where there is a mu
  int32_t status;
};

struct Batch {
  const Kernels* kernels;
  float* logits;       // [num_rows][stride]
  float* summaries;    // [num_rows][summary_stride], see rows/summary.h; null: there are none
  Request* requests;   // [num_rows]
  int64_t* top_ids;
  double* top_logprobs;
  int64_t num_rows, stride, summary_stride, vocab;
  int64_t num_threads;
  int64_t next;  // the first row that no thread has begun, counted up by all of them
};

// Does one row. Changes its logits meanwhile, if it is asked to, and puts them back.
void sample_row(const Batch& batch, float* logits, Request& request);

}  // namespace onnxport
