// What this processor can do at most, with so many threads: one JSON object on a line.
//
//     c++ -O3 -march=native -pthread benchmarks/limits.cpp -o limits && ./limits 2
//
// read_gb_s: a plain loop over memory that no cache holds, GB/s, on average over two seconds and
// more, as a decode's rate is; best_read_gb_s: of its fastest gigabyte. The others are 10^9
// operations a second, a multiplication and an addition being two, of registers alone: fp32, and
// where there are instructions for them bf16 and int8. AMX tiles are not counted.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr size_t kBytes = size_t{1} << 30;
constexpr double kReadSeconds = 2;

double seconds_of(int threads, const std::function<void(int)>& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work, i);
  work(0);
  for (std::thread& thread : others) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Thirty-two sums, which compilers keep in the widest registers that they know.
uint64_t sum_of(const uint64_t* words, size_t count) {
  uint64_t sums[32] = {};
  for (size_t i = 0; i < count; i += 32)
    for (size_t j = 0; j < 32; j++) sums[j] += words[i + j];
  uint64_t sum = 0;
  for (uint64_t one : sums) sum += one;
  return sum;
}

struct ReadRate {
  double average, best;  // GB/s
};

ReadRate read_rate(int threads) {
  auto* words = static_cast<uint64_t*>(std::aligned_alloc(size_t{2} << 20, kBytes));
  if (!words) std::abort();
#if defined(__linux__)
  madvise(words, kBytes, MADV_HUGEPAGE);
#endif
  std::memset(words, 1, kBytes);
  const size_t part = kBytes / sizeof(uint64_t) / static_cast<size_t>(threads) / 32 * 32;
  std::vector<uint64_t> sums(static_cast<size_t>(threads));
  double best = 1e30, total = 0;
  int passes = 0;
  for (; total < kReadSeconds; passes++) {
    const double seconds = seconds_of(threads, [&](int i) {
      sums[static_cast<size_t>(i)] = sum_of(words + static_cast<size_t>(i) * part, part);
    });
    if (seconds < best) best = seconds;
    total += seconds;
  }
  if (sums[0] == 0) std::abort();  // the sums are needed
  std::free(words);
  const double gigabytes = static_cast<double>(part) * sizeof(uint64_t) * threads / 1e9;
  return {gigabytes * passes / total, gigabytes / best};
}

#if defined(__AVX512F__)
using Floats = __m512;
using Ints = __m512i;

constexpr int kRounds = 5;
constexpr int64_t kSteps = 20'000'000;

// Twelve sums that do not wait for one another. Each has a name: an array would live in memory.
#define ONNXPORT_EACH(DO) \
  DO(a) DO(b) DO(c) DO(d) DO(e) DO(f) DO(g) DO(h) DO(i) DO(j) DO(k) DO(l)
#define ONNXPORT_DECLARE(x) Sum x = zero;
#define ONNXPORT_STEP(x) \
  x = step(x);           \
  __asm__ volatile("" : "+v"(x)); /* every one, every time */

double best_of(int threads, const std::function<void(int)>& work) {
  double best = 1e30;
  for (int i = 0; i < kRounds; i++) {
    const double seconds = seconds_of(threads, work);
    if (seconds < best) best = seconds;
  }
  return best;
}

template <class Sum, class Step>
double rate(int threads, double operations, Sum zero, Step step) {
  const double seconds = best_of(threads, [&](int) {
    ONNXPORT_EACH(ONNXPORT_DECLARE)
    for (int64_t n = 0; n < kSteps; n++) {
      ONNXPORT_EACH(ONNXPORT_STEP)
    }
  });
  return operations * 12 * kSteps * threads / seconds / 1e9;
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1) return 2;
  const ReadRate read = read_rate(threads);
  std::printf("{\"threads\": %d, \"read_gb_s\": %.1f, \"best_read_gb_s\": %.1f", threads,
              read.average, read.best);
#if defined(__AVX512F__)
  const Floats half = _mm512_set1_ps(0.5f);
  std::printf(", \"fp32\": %.0f", rate(threads, 32, _mm512_setzero_ps(), [&](Floats sum) {
                return _mm512_fmadd_ps(half, half, sum);
              }));
#if defined(__AVX512BF16__)
  const auto pairs = (__m512bh)_mm512_set1_epi16(0x3f00);
  std::printf(", \"bf16\": %.0f", rate(threads, 64, _mm512_setzero_ps(), [&](Floats sum) {
                return _mm512_dpbf16_ps(sum, pairs, pairs);
              }));
#endif
#if defined(__AVX512VNNI__)
  const Ints bytes = _mm512_set1_epi8(3);
  std::printf(", \"int8\": %.0f", rate(threads, 128, _mm512_setzero_si512(), [&](Ints sum) {
                return _mm512_dpbusd_epi32(sum, bytes, bytes);
              }));
#endif
#endif
  std::printf("}\n");
  return 0;
}
