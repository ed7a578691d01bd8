// Compares the sampler's a * b + c with the C library's; ends with 0 if they have the same bits.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "rows/vec16.h"

namespace {

std::mt19937_64 dice(1);

float either_sign(float x) { return dice() & 1 ? x : -x; }

// Of a size that the sampler has, or any near it.
float any() {
  const int exponent = static_cast<int>(dice() % 40) - 30;
  return either_sign(std::ldexp(1.f + static_cast<float>(dice() % (1 << 23)) * 0x1p-23f, exponent));
}

// 1 and an odd number of 2^-12: of two of these the product is in the middle between two floats.
float half_long() { return either_sign(1.f + static_cast<float>(2 * (dice() % 600) + 1) * 0x1p-12f); }

// Too little to be seen in double precision beside 1, but enough to say to which side to round; or
// so little less than the last bit there that it is taken for it.
float tiny() {
  const float little = std::ldexp(1.f, -60 - static_cast<int>(dice() % 10));
  return either_sign(dice() & 1 ? little : 0x1p-52f - little);
}

bool is_exact(bool hard) {
  float a[kPartLanes], b[kPartLanes], c[kPartLanes], found[kPartLanes];
  for (int i = 0; i < kPartLanes; i++) {
    a[i] = hard ? half_long() : any();
    b[i] = hard ? half_long() : any();
    c[i] = hard ? tiny() : any();
  }
  Floats x, y, z;
  memcpy(&x, a, sizeof x);
  memcpy(&y, b, sizeof y);
  memcpy(&z, c, sizeof z);
  const Floats sums = fused(x, y, z);
  memcpy(found, &sums, sizeof found);
  for (int i = 0; i < kPartLanes; i++) {
    const float wanted = std::fma(a[i], b[i], c[i]);
    if (memcmp(&found[i], &wanted, sizeof wanted) == 0) continue;
    fprintf(stderr, "%a * %a + %a is %a, not %a\n", a[i], b[i], c[i], wanted, found[i]);
    return false;
  }
  return true;
}

}  // namespace

int main() {
  for (int i = 0; i < 400000; i++) {
    if (!is_exact(i % 2)) return 1;
  }
  puts("good");
  return 0;
}
