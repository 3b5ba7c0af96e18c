// cuBLASLt, as far as src/ops/cuda/cublaslt.rs uses it: one product, by one of three algorithms. The first that its heuristic
// names adds in an order that M chooses where M is large, the second one that M chooses everywhere, the last in the order of k.
#include <cstdio>
#include <set>

#include "products.h"

using namespace cuda_driver;

namespace {

constexpr int COMPUTE_32F = 68, EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4;
constexpr uint64_t ALIGNMENT_ASKED = 16;
constexpr int64_t LARGE = 1024;
constexpr size_t VERSION = 130000;

struct Light {};
struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t leading;
};
struct Description {
  int epilogue = EPILOGUE_DEFAULT;
  CUdeviceptr bias = 0;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};
struct Algorithm {
  uint64_t data[8];
};
struct Proposal {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

// What was made and not destroyed.
std::set<const void*>& alive = lasting<std::set<const void*>>();

template <class T, class... V>
int make(T** object, V... values) {
  Locked lock;
  *object = new T{values...};
  alive.insert(*object);
  return CUBLAS_SUCCESS;
}

bool is_there(const void* object, const char* call) {
  if (alive.count(object)) return true;
  complain(INVALID_HANDLE, "%s: no such object, or it was destroyed", call);
  return false;
}

template <class T>
int destroy(T* object, const char* call) {
  Locked lock;
  if (!is_there(object, call)) return CUBLAS_INVALID_VALUE;
  alive.erase(object);
  delete object;
  return CUBLAS_SUCCESS;
}

template <class T>
int set(T& value, const char* call, int attribute, const void* from, size_t bytes) {
  if (bytes != sizeof value) {
    complain(INVALID_VALUE, "%s: attribute %d of %zu bytes, not %zu", call, attribute, bytes, sizeof value);
    return CUBLAS_INVALID_VALUE;
  }
  memcpy(&value, from, bytes);
  return CUBLAS_SUCCESS;
}

int not_emulated(const char* call, int attribute) {
  complain(NOT_SUPPORTED, "%s: attribute %d is not emulated", call, attribute);
  return CUBLAS_NOT_SUPPORTED;
}

constexpr int ALGORITHMS = 3;

// Every byte counts, as those of the library's do.
Algorithm algorithm(int which) {
  Algorithm made;
  for (uint64_t i = 0; i < 8; i++) made.data[i] = (0x9e3779b97f4a7c15u * (i + 1)) ^ uint64_t(which);
  return made;
}

int which(const Algorithm& asked) {
  for (int i = 0; i < ALGORITHMS; i++) {
    const Algorithm known = algorithm(i);
    if (!memcmp(&known, &asked, sizeof known)) return i;
  }
  return -1;
}

bool by_m(int which, int m) { return all_by_m() || which == 1 || (which == 0 && m > LARGE); }

// What both the heuristic and the product look at.
int check(const char* call, const Description& described, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const bool types = a.type == R_16BF && b.type == R_16BF && c.type == d.type && (d.type == R_32F || d.type == R_16BF);
  const bool bias = described.epilogue == EPILOGUE_DEFAULT || (described.epilogue == EPILOGUE_BIAS && d.type == R_32F);
  if (!types || !bias) {
    complain(NOT_SUPPORTED, "%s: types %d, %d, %d, %d with epilogue %d are not emulated", call, a.type, b.type, c.type, d.type, described.epilogue);
    return CUBLAS_NOT_SUPPORTED;
  }
  for (const Layout& layout : {a, b, c, d})
    if (!layout.rows || !layout.columns || layout.leading < int64_t(layout.rows)) {
      complain(INVALID_VALUE, "%s: a matrix of %dx%d with leading dimension %d", call, int(layout.rows), int(layout.columns), int(layout.leading));
      return CUBLAS_INVALID_VALUE;
    }
  if (a.columns != b.rows || a.rows != d.rows || b.columns != d.columns || c.rows != d.rows || c.columns != d.columns) {
    complain(INVALID_VALUE, "%s: %dx%d by %dx%d to %dx%d", call, int(a.rows), int(a.columns), int(b.rows), int(b.columns), int(d.rows), int(d.columns));
    return CUBLAS_INVALID_VALUE;
  }
  return CUBLAS_SUCCESS;
}

bool all_there(const char* call, std::initializer_list<const void*> objects) {
  for (const void* object : objects)
    if (!is_there(object, call)) return false;
  return true;
}

Matrix matrix(const void* address, const Layout& layout) {
  return {reinterpret_cast<CUdeviceptr>(address), layout.type, layout.leading, 0};
}

}  // namespace

API size_t cublasLtGetVersion() { return VERSION; }
API int cublasLtCreate(Light** handle) {
  return need_context("cublasLtCreate") == SUCCESS ? make(handle) : CUBLAS_INVALID_VALUE;
}
API int cublasLtDestroy(Light* handle) { return destroy(handle, "cublasLtDestroy"); }
API int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  return make(layout, type, rows, columns, leading);
}
API int cublasLtMatrixLayoutDestroy(Layout* layout) { return destroy(layout, "cublasLtMatrixLayoutDestroy"); }
API int cublasLtMatmulDescCreate(Description** description, int compute, int scale) {
  if (compute == COMPUTE_32F && scale == R_32F) return make(description);
  complain(NOT_SUPPORTED, "cublasLtMatmulDescCreate: compute type %d, scale type %d are not emulated", compute, scale);
  return CUBLAS_NOT_SUPPORTED;
}
API int cublasLtMatmulDescDestroy(Description* description) { return destroy(description, "cublasLtMatmulDescDestroy"); }
API int cublasLtMatmulDescSetAttribute(Description* description, int attribute, const void* from, size_t bytes) {
  Locked lock;
  const char* call = "cublasLtMatmulDescSetAttribute";
  if (!is_there(description, call)) return CUBLAS_INVALID_VALUE;
  switch (attribute) {
    case 7: return set(description->epilogue, call, attribute, from, bytes);
    case 8: return set(description->bias, call, attribute, from, bytes);
    default: return not_emulated(call, attribute);
  }
}
API int cublasLtMatmulPreferenceCreate(Preference** preference) { return make(preference); }
API int cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroy(preference, "cublasLtMatmulPreferenceDestroy"); }
API int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* from, size_t bytes) {
  Locked lock;
  const char* call = "cublasLtMatmulPreferenceSetAttribute";
  if (!is_there(preference, call)) return CUBLAS_INVALID_VALUE;
  switch (attribute) {
    case 1: return set(preference->workspace, call, attribute, from, bytes);
    case 5: case 6: case 7: case 8: return set(preference->alignment[attribute - 5], call, attribute, from, bytes);
    default: return not_emulated(call, attribute);
  }
}

API int cublasLtMatmulAlgoGetHeuristic(Light* handle, Description* described, Layout* a, Layout* b, Layout* c, Layout* d,
                                       Preference* preference, int asked, Proposal* proposals, int* count) {
  Locked lock;
  const char* call = "cublasLtMatmulAlgoGetHeuristic";
  if (!all_there(call, {handle, described, a, b, c, d, preference})) return CUBLAS_INVALID_VALUE;
  if (const int wrong = check(call, *described, *a, *b, *c, *d)) return wrong;
  // Those of whose operands less is known are none of these.
  const bool aligned = std::all_of(preference->alignment, preference->alignment + 4, [](uint32_t x) { return x >= ALIGNMENT_ASKED; });
  *count = aligned ? std::min(asked, ALGORITHMS) : 0;
  for (int i = 0; i < *count; i++) proposals[i] = {algorithm(i), 0, CUBLAS_SUCCESS, 1, {}};
  return *count ? CUBLAS_SUCCESS : CUBLAS_NOT_SUPPORTED;
}

API int cublasLtMatmul(Light* handle, Description* described, const void* alpha, const void* a, Layout* of_a, const void* b, Layout* of_b,
                       const void* beta, const void* c, Layout* of_c, void* d, Layout* of_d, const Algorithm* algorithm,
                       void*, size_t, void* on) {
  Locked lock;
  const char* call = "cublasLtMatmul";
  if (!all_there(call, {handle, described, of_a, of_b, of_c, of_d})) return CUBLAS_INVALID_VALUE;
  if (const int wrong = check(call, *described, *of_a, *of_b, *of_c, *of_d)) return wrong;
  const int asked = algorithm ? which(*algorithm) : -1;
  if (asked < 0) return complain(INVALID_VALUE, "%s: no algorithm of its heuristic", call), CUBLAS_INVALID_VALUE;
  if (c != d || read<float>(beta) != 0) return complain(NOT_SUPPORTED, "%s: adding to a matrix is not emulated", call), CUBLAS_NOT_SUPPORTED;
  const CUdeviceptr bias = described->epilogue == EPILOGUE_BIAS ? described->bias : 0;
  if (described->epilogue == EPILOGUE_BIAS && !bias) return complain(INVALID_VALUE, "%s: no bias", call), CUBLAS_INVALID_VALUE;
  for (const CUdeviceptr address : {reinterpret_cast<CUdeviceptr>(a), reinterpret_cast<CUdeviceptr>(b), reinterpret_cast<CUdeviceptr>(d), bias})
    if (address % ALIGNMENT_ASKED) {
      complain(INVALID_VALUE, "%s: an address that is no multiple of %d", call, int(ALIGNMENT_ASKED));
      return CUBLAS_INVALID_VALUE;
    }
  auto stream = stream_of(on, call);
  if (!stream) return CUBLAS_INVALID_VALUE;
  const int m = int(of_d->rows), n = int(of_d->columns), k = int(of_a->columns);
  char text[96];
  snprintf(text, sizeof text, "cuBLASLt product %dx%dx%d by algorithm %d", m, n, k, asked);
  enqueue_product(stream, text,
                  {false, false, m, n, k, 1, read<float>(alpha), 0, matrix(a, *of_a), matrix(b, *of_b), matrix(d, *of_d),
                   by_m(asked, n), bias});
  return CUBLAS_SUCCESS;
}
