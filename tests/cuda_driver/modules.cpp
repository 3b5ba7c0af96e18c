// Modules of kernels, their functions and launches.
#include <dirent.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "driver.h"
#include "engine.h"
#include "faults.h"

namespace cuda_driver {
namespace {

constexpr int SHARED_BYTES_UNASKED = 48 << 10;

struct Function {
  const Kernel* kernel;
  void* module;
  int shared_bytes_max = SHARED_BYTES_UNASKED;
  int carveout = -1;
  bool is_loaded = false;
};

struct Loaded {
  void* library = nullptr;
  int file = -1;  // of an image in memory; open as long, for the loader takes one name for one library
  const Module* module = nullptr;
  std::map<std::string, std::unique_ptr<Function>> functions;

  Loaded() = default;
  Loaded(const Loaded&) = delete;
  ~Loaded() {
    if (library) dlclose(library);
    if (file >= 0) close(file);
  }
};

auto& modules = lasting<std::map<void*, std::unique_ptr<Loaded>>>();
auto& functions = lasting<std::map<void*, Function*>>();  // of loaded modules

const Module* table_of(void* library) {
  return library ? static_cast<const Module*>(dlsym(library, "emulated_module")) : nullptr;
}

// Beside this library's folder.
std::string modules_folder() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&modules_folder), &info);
  char* path = realpath(info.dli_fname, nullptr);
  std::string folder = path;
  free(path);
  for (int i = 0; i < 2; i++) folder.resize(folder.rfind('/'));
  return folder + "/modules";
}

// ---- Images ---------------------------------------------------------------------------------------------------------

// A shared object in memory, as long as its header says.
void open_object(Loaded& loaded, const unsigned char* image) {
  const auto read = [&](size_t at, auto value) { return memcpy(&value, image + at, sizeof value), value; };
  const size_t bytes = read(0x28, uint64_t()) + size_t(read(0x3a, uint16_t())) * read(0x3c, uint16_t());
  loaded.file = memfd_create("kernels", MFD_CLOEXEC);
  for (size_t written = 0; written < bytes;) {
    const ssize_t now = write(loaded.file, image + written, bytes - written);
    if (now <= 0) break;
    written += size_t(now);
  }
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", loaded.file);
  loaded.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

struct Entry {  // of real PTX
  std::string name;
  std::vector<size_t> parameter_bytes;
  int threads_max = 0;
};

std::vector<Entry> entries_of(const char* text) {
  std::vector<Entry> entries;
  bool in_head = false;
  std::istringstream lines(text);
  for (std::string one; std::getline(lines, one);) {
    const char* line = one.c_str();
    char word[32];
    char name[512];
    int number;
    if (sscanf(line, " .visible .entry %511[^( \n]", name) == 1) {
      entries.push_back({name, {}, 0});
      in_head = true;
    } else if (in_head && sscanf(line, " .param .align %*d .b8 %511[^[ \n][%d]", name, &number) == 2) {
      entries.back().parameter_bytes.push_back(size_t(number));
    } else if (in_head && sscanf(line, " .param .%*[a-z]%31[0-9]", word) == 1) {
      entries.back().parameter_bytes.push_back(size_t(atoi(word)) / 8);
    } else if (in_head && sscanf(line, " .maxntid %d", &number) == 1) {
      entries.back().threads_max = number;
    } else if (*line == '{') {
      in_head = false;
    }
  }
  return entries;
}

const Kernel* find(const Module& module, const std::string& name) {
  for (int i = 0; i < module.kernel_count; i++)
    if (module.kernels[i].name == name) return &module.kernels[i];
  return nullptr;
}

std::string differs(const Entry& entry, const Kernel* kernel) {
  char text[256] = "";
  if (!kernel) {
    snprintf(text, sizeof text, "is in the PTX alone");
  } else if (entry.threads_max != kernel->threads_max) {
    snprintf(text, sizeof text, "has launch bounds of %d in the PTX, of %d here", entry.threads_max, kernel->threads_max);
  } else if (int(entry.parameter_bytes.size()) != kernel->parameters) {
    snprintf(text, sizeof text, "has %zu parameters in the PTX, %d here", entry.parameter_bytes.size(), kernel->parameters);
  } else {
    for (int i = 0; i < kernel->parameters; i++)
      if (entry.parameter_bytes[size_t(i)] != kernel->parameter_bytes[i])
        snprintf(text, sizeof text, "has a parameter %d of %zu bytes in the PTX, of %zu here", i,
                 entry.parameter_bytes[size_t(i)], kernel->parameter_bytes[i]);
  }
  return text;
}

// The newest module that has a kernel.
void* open_module_with(const std::string& kernel) {
  const std::string folder = modules_folder();
  void* newest = nullptr;
  timespec when{};
  DIR* list = opendir(folder.c_str());
  while (dirent* file = list ? readdir(list) : nullptr) {
    const std::string path = folder + "/" + file->d_name;
    struct stat status;
    if (path.size() < 3 || path.substr(path.size() - 3) != ".so" || stat(path.c_str(), &status)) continue;
    const bool newer = status.st_mtim.tv_sec > when.tv_sec ||
                       (status.st_mtim.tv_sec == when.tv_sec && status.st_mtim.tv_nsec > when.tv_nsec);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const Module* module = table_of(library);
    if (module && newer && find(*module, kernel)) {
      std::swap(newest, library);
      when = status.st_mtim;
    }
    if (library) dlclose(library);
  }
  if (list) closedir(list);
  return newest;
}

// nvcc's own PTX stands for the module of its kernels, which must take what it takes.
void* open_real_ptx(const char* text) {
  const std::vector<Entry> entries = entries_of(text);
  if (entries.empty()) return complain(INVALID_IMAGE, "cuModuleLoadData: neither PTX nor a module"), nullptr;
  void* library = open_module_with(entries[0].name);
  const Module* module = table_of(library);
  if (!module) return complain(INVALID_IMAGE, "cuModuleLoadData: no module has kernel %s", entries[0].name.c_str()), nullptr;
  for (const Entry& entry : entries) {
    const std::string wrong = differs(entry, find(*module, entry.name));
    if (wrong.empty()) continue;
    complain(INVALID_IMAGE, "cuModuleLoadData: %s %s", entry.name.c_str(), wrong.c_str());
    dlclose(library);
    return nullptr;
  }
  return library;
}

// ---- Launches -------------------------------------------------------------------------------------------------------

struct Launch {
  const Kernel* kernel;
  dim3 grid, block;
  size_t shared_bytes;
  std::vector<std::vector<char>> parameters;  // the call may change its own once it has returned
};

// Every address that a kernel is given must be null or lie in a buffer that is in use at its turn.
CUresult check_addresses(const Launch& launch) {
  for (int i = 0; i < launch.kernel->address_count; i++) {
    const Address& place = launch.kernel->addresses[i];
    const auto address = read<CUdeviceptr>(&launch.parameters[size_t(place.parameter)][place.offset]);
    const std::string wrong = address ? wrong_range(address, 0) : "";
    if (!wrong.empty())
      return complain(ILLEGAL_ADDRESS, "%s: parameter %d%s%s: %s", launch.kernel->name, place.parameter,
                      place.field ? ", field " : "", place.field ? place.field : "", wrong.c_str());
  }
  return SUCCESS;
}

void run(Launch& launch) {
  if (stick(check_addresses(launch))) return;
  std::vector<void*> parameters;
  for (std::vector<char>& value : launch.parameters) parameters.push_back(value.data());
  cuda_host::Options options;
  options.tensor_core = cuda_host::TensorCore::hopper;
  try {
    InKernel inside;
    cuda_host::launch(options, launch.grid, launch.block, launch.shared_bytes,
                      [&] { launch.kernel->call(parameters.data()); });
  } catch (const cuda_host::KernelError& error) {
    stick(complain(LAUNCH_FAILED, "%s: %s", launch.kernel->name, error.what()));
  }
}

std::string wrong_size(const Function& function, dim3 grid, dim3 block, unsigned shared_bytes) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  const int bound = function.kernel->threads_max ? function.kernel->threads_max : 1024;
  char text[160] = "";
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
    snprintf(text, sizeof text, "a grid of %ux%ux%u blocks", grid.x, grid.y, grid.z);
  else if (!threads || threads > 1024 || block.z > 64)
    snprintf(text, sizeof text, "blocks of %ux%ux%u threads", block.x, block.y, block.z);
  else if (threads > uint64_t(bound))
    snprintf(text, sizeof text, "blocks of %zu threads, its launch bounds are %d", size_t(threads), bound);
  else if (shared_bytes > unsigned(function.shared_bytes_max))
    snprintf(text, sizeof text, "%u bytes of dynamic shared memory, it may have %d", shared_bytes, function.shared_bytes_max);
  return text;
}

bool loads_eagerly() {
  static const char* loading = getenv("CUDA_MODULE_LOADING");
  return loading && !strcmp(loading, "EAGER");
}

// With lazy loading, the driver may wait for all work of the device before it loads. If some of it waits for another
// process, both may hang. Other work is not run here, because late work shows more.
void lazy_load(const std::string& what) {
  const std::string waiting = waiting_for_others();
  if (!waiting.empty())
    complain(SUCCESS, "%s is loaded while %s waits for another process: a GPU may hang", what.c_str(), waiting.c_str());
}

void load(Function& function) {
  if (!function.is_loaded) lazy_load(function.kernel->name);
  function.is_loaded = true;
}

Function* make_function(void* module, Loaded& loaded, const Kernel* kernel) {
  auto& function = loaded.functions[kernel->name];
  if (!function) {
    function = std::make_unique<Function>();
    function->kernel = kernel;
    function->module = module;
    function->is_loaded = loads_eagerly();
    functions[function.get()] = function.get();
  }
  return function.get();
}

Loaded* module_of(void* handle, const char* call) {
  auto found = modules.find(handle);
  if (found != modules.end()) return found->second.get();
  complain(INVALID_HANDLE, "%s: no such module, or it was unloaded", call);
  return nullptr;
}

Function* function_of(void* handle, const char* call) {
  auto found = functions.find(handle);
  if (found != functions.end()) return found->second;
  complain(INVALID_HANDLE, "%s: no such kernel, or its module was unloaded", call);
  return nullptr;
}

}  // namespace

void tell_leaked_modules() {
  for (auto& [_, loaded] : modules) fprintf(stderr, "cuda-emulator: leaked at exit: the module of %s\n", loaded->module->source);
}

}  // namespace cuda_driver

using namespace cuda_driver;

API CUresult cuModuleLoadData(void** handle, const void* image) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  if (CUresult error = not_while_any_is_captured(__func__)) return error;
  const char* text = static_cast<const char*>(image);
  char name[256];
  auto loaded = std::make_unique<Loaded>();
  if (!memcmp(text, "\177ELF", 4)) {
    if (getenv("CUDA_EMULATOR_REFUSES_CUBINS")) return NO_BINARY_FOR_GPU;
    open_object(*loaded, static_cast<const unsigned char*>(image));
  } else if (sscanf(text, "// emulated: %255s", name) == 1) {
    loaded->library = dlopen((modules_folder() + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  } else if (sscanf(text, "// not emulated: %255s", name) == 1) {
    return complain(NOT_SUPPORTED, "cuModuleLoadData: the kernels of %s are not emulated", name);
  } else if (!(loaded->library = open_real_ptx(text))) {
    return INVALID_IMAGE;
  }
  loaded->module = table_of(loaded->library);
  if (!loaded->module) {
    const char* error = loaded->library ? nullptr : dlerror();
    return complain(INVALID_IMAGE, "cuModuleLoadData: %s", error ? error : "an object without kernels");
  }
  if (!loads_eagerly()) lazy_load(std::string("the module of ") + loaded->module->source);
  *handle = loaded.get();
  modules[*handle] = std::move(loaded);
  return SUCCESS;
}

API CUresult cuModuleUnload(void* handle) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  auto found = modules.find(handle);
  if (found == modules.end()) return complain(INVALID_HANDLE, "cuModuleUnload: no such module, or it was unloaded before");
  if (CUresult error = not_while_any_is_captured(__func__)) return error;
  run_everything();
  for (auto& [_, function] : found->second->functions) functions.erase(function.get());
  modules.erase(found);
  return SUCCESS;
}

API CUresult cuModuleGetFunction(void** handle, void* module_handle, const char* name) {
  Locked lock;
  Loaded* loaded = module_of(module_handle, __func__);
  if (!loaded) return INVALID_HANDLE;
  const Kernel* kernel = find(*loaded->module, name);
  if (!kernel) return complain(NOT_FOUND, "cuModuleGetFunction: %s has no kernel %s", loaded->module->source, name);
  return *handle = make_function(module_handle, *loaded, kernel), SUCCESS;
}

API CUresult cuModuleGetFunctionCount(unsigned* count, void* handle) {
  Locked lock;
  Loaded* loaded = module_of(handle, __func__);
  return loaded ? (*count = unsigned(loaded->module->kernel_count), SUCCESS) : INVALID_HANDLE;
}

API CUresult cuModuleEnumerateFunctions(void** handles, unsigned count, void* handle) {
  Locked lock;
  Loaded* loaded = module_of(handle, __func__);
  if (!loaded) return INVALID_HANDLE;
  for (int i = 0; i < int(count) && i < loaded->module->kernel_count; i++)
    handles[i] = make_function(handle, *loaded, &loaded->module->kernels[i]);
  return SUCCESS;
}

API CUresult cuFuncGetModule(void** module, void* handle) {
  Locked lock;
  Function* function = function_of(handle, __func__);
  return function ? (*module = function->module, SUCCESS) : INVALID_HANDLE;
}

// CUfunctionLoadingState: not loaded, loaded.
API CUresult cuFuncIsLoaded(int* state, void* handle) {
  Locked lock;
  Function* function = function_of(handle, __func__);
  return function ? (*state = function->is_loaded, SUCCESS) : INVALID_HANDLE;
}

API CUresult cuFuncLoad(void* handle) {
  Locked lock;
  Function* function = function_of(handle, __func__);
  return function ? (load(*function), SUCCESS) : INVALID_HANDLE;
}

constexpr int MAX_THREADS = 0, MAX_DYNAMIC_SHARED_BYTES = 8, SHARED_CARVEOUT = 9;  // CUfunction_attribute

API CUresult cuFuncSetAttribute(void* handle, int attribute, int value) {
  Locked lock;
  Function* function = function_of(handle, __func__);
  if (!function) return INVALID_HANDLE;
  const char* name = function->kernel->name;
  switch (attribute) {
    case MAX_DYNAMIC_SHARED_BYTES:
      if (value < 0 || size_t(value) > cuda_host::SHARED_BYTES_MAX)
        return complain(INVALID_VALUE, "cuFuncSetAttribute: %s: %d bytes of dynamic shared memory", name, value);
      return function->shared_bytes_max = value, SUCCESS;
    case SHARED_CARVEOUT:
      if (value < -1 || value > 100)
        return complain(INVALID_VALUE, "cuFuncSetAttribute: %s: a carve-out of %d percent", name, value);
      return function->carveout = value, SUCCESS;
  }
  return complain(NOT_SUPPORTED, "kernel attribute %d is not emulated", attribute);
}

API CUresult cuFuncGetAttribute(int* value, int attribute, void* handle) {
  Locked lock;
  Function* function = function_of(handle, __func__);
  if (!function) return INVALID_HANDLE;
  switch (attribute) {
    case MAX_THREADS: return *value = function->kernel->threads_max ? function->kernel->threads_max : 1024, SUCCESS;
    case MAX_DYNAMIC_SHARED_BYTES: return *value = function->shared_bytes_max, SUCCESS;
    case SHARED_CARVEOUT: return *value = function->carveout, SUCCESS;
  }
  return complain(NOT_SUPPORTED, "kernel attribute %d is not emulated", attribute);
}

API CUresult cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_bytes, void* stream_handle,
                            void** parameters, void** extra) {
  Locked lock;
  if (stuck()) return stuck();
  auto stream = stream_of(stream_handle, __func__);
  Function* function = function_of(handle, __func__);
  if (!stream || !function) return INVALID_HANDLE;
  const Kernel& kernel = *function->kernel;
  if (extra) return complain(NOT_SUPPORTED, "%s: a launch with `extra` is not emulated", kernel.name);
  auto launch = std::make_shared<Launch>();
  *launch = {&kernel, dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z), shared_bytes, {}};
  const std::string wrong = wrong_size(*function, launch->grid, launch->block, shared_bytes);
  if (!wrong.empty()) return complain(INVALID_VALUE, "%s: %s", kernel.name, wrong.c_str());
  if (CUresult error = captured_launch(stream)) return error;
  load(*function);
  for (int i = 0; i < kernel.parameters; i++) {
    const char* from = static_cast<const char*>(parameters[i]);
    launch->parameters.emplace_back(from, from + kernel.parameter_bytes[i]);
  }
  enqueue(stream, kernel.name, [launch] { run(*launch); });
  return stuck();
}
