// cuRAND, as far as candle uses it: numbers of the same distributions, not the library's.
#include <cmath>
#include <random>

#include "driver.h"

using namespace cuda_driver;

namespace {

enum { CURAND_SUCCESS = 0, CURAND_LENGTH_NOT_MULTIPLE = 105, CURAND_LAUNCH_FAILURE = 201 };

struct Generator {
  std::mt19937_64 random;
  void* stream = nullptr;
};

template <class T, class Distribution>
int fill(Generator* generator, T* out, size_t count, Distribution distribution) {
  Locked lock;
  auto stream = stream_of(generator->stream, "cuRAND");
  if (!stream) return CURAND_LAUNCH_FAILURE;
  std::mt19937_64 random(generator->random());
  enqueue(stream, "cuRAND", [=]() mutable {
    if (!check_range("cuRAND", reinterpret_cast<CUdeviceptr>(out), count * sizeof(T))) return;
    for (size_t i = 0; i < count; i++) out[i] = distribution(random);
  });
  return CURAND_SUCCESS;
}

template <class T>
int fill_normal(Generator* generator, T* out, size_t count, T mean, T deviation) {
  if (count % 2) return CURAND_LENGTH_NOT_MULTIPLE;
  return fill(generator, out, count, std::normal_distribution<T>(mean, deviation));
}

}  // namespace

API int curandCreateGenerator(Generator** generator, int) { return *generator = new Generator, CURAND_SUCCESS; }
API int curandDestroyGenerator(Generator* generator) { return delete generator, CURAND_SUCCESS; }
API int curandSetStream(Generator* generator, void* stream) { return generator->stream = stream, CURAND_SUCCESS; }
API int curandSetPseudoRandomGeneratorSeed(Generator* generator, unsigned long long seed) {
  return generator->random.seed(seed), CURAND_SUCCESS;
}
API int curandGenerateUniform(Generator* generator, float* out, size_t count) {
  return fill(generator, out, count, std::uniform_real_distribution<float>());
}
API int curandGenerateUniformDouble(Generator* generator, double* out, size_t count) {
  return fill(generator, out, count, std::uniform_real_distribution<double>());
}
API int curandGenerateNormal(Generator* generator, float* out, size_t count, float mean, float deviation) {
  return fill_normal(generator, out, count, mean, deviation);
}
API int curandGenerateNormalDouble(Generator* generator, double* out, size_t count, double mean, double deviation) {
  return fill_normal(generator, out, count, mean, deviation);
}
