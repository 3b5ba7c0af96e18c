// The driver's calls that its tests make, as NVIDIA's headers declare them.
#pragma once

#include <cstddef>
#include <cstdint>

typedef uint64_t Device;
extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void**, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuCtxSetCurrent(void*);
int cuCtxSynchronize();
int cuDeviceGetAttribute(int*, int, int);
int cuMemAlloc_v2(Device*, size_t);
int cuMemFree_v2(Device);
int cuMemAllocAsync(Device*, size_t, void*);
int cuMemFreeAsync(Device, void*);
int cuMemGetInfo_v2(size_t*, size_t*);
int cuDeviceGetDefaultMemPool(void**, int);
int cuMemPoolGetAttribute(void*, int, void*);
int cuMemPoolSetAttribute(void*, int, void*);
int cuMemHostAlloc(void**, size_t, unsigned);
int cuMemFreeHost(void*);
int cuMemcpyHtoD_v2(Device, const void*, size_t);
int cuMemcpyHtoDAsync_v2(Device, const void*, size_t, void*);
int cuMemcpyDtoH_v2(void*, Device, size_t);
int cuMemcpyDtoHAsync_v2(void*, Device, size_t, void*);
int cuMemcpyDtoDAsync_v2(Device, Device, size_t, void*);
int cuMemsetD8Async(Device, unsigned char, size_t, void*);
int cuStreamCreate(void**, unsigned);
int cuStreamDestroy_v2(void*);
int cuStreamSynchronize(void*);
int cuStreamQuery(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
int cuEventCreate(void**, unsigned);
int cuEventDestroy_v2(void*);
int cuEventRecord(void*, void*);
int cuEventSynchronize(void*);
int cuEventElapsedTime_v2(float*, void*, void*);
int cuModuleLoadData(void**, const void*);
int cuModuleUnload(void*);
int cuModuleGetFunction(void**, void*, const char*);
int cuModuleGetFunctionCount(unsigned*, void*);
int cuModuleEnumerateFunctions(void**, unsigned, void*);
int cuFuncGetModule(void**, void*);
int cuFuncLoad(void*);
int cuFuncSetAttribute(void*, int, int);
int cuFuncGetAttribute(int*, int, void*);
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
int cuStreamBeginCapture_v2(void*, int);
int cuStreamEndCapture(void*, void**);
int cuStreamIsCapturing(void*, int*);
int cuGraphInstantiateWithFlags(void**, void*, unsigned long long);
int cuGraphLaunch(void*, void*);
int cuMemPoolTrimTo(void*, size_t);
int cuGraphUpload(void*, void*);
int cuGraphExecDestroy(void*);
int cuGraphDestroy(void*);
int cuGraphClone(void**, void*);
int cublasCreate_v2(void**);
int cublasSetStream_v2(void*, void*);
int cublasGemmStridedBatchedEx(void*, int, int, int, int, int, const void*, const void*, int, int, int64_t, const void*,
                               int, int, int64_t, const void*, void*, int, int, int64_t, int, int, int);
int cublasSgemv_v2();
}
