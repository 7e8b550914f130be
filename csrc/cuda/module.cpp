// The CUDA module. Importing it runs the registrations of csrc/cuda.

#include <Python.h>
#include <cuda_runtime_api.h>

#include "cuda/stream.h"

namespace {

PyObject* toolkit_version(PyObject*, PyObject*) {
  return PyUnicode_FromFormat("%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

PyMethodDef methods[] = {
    {"toolkit_version", toolkit_version, METH_NOARGS, "The CUDA toolkit that the kernels were built with."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C_cuda() {
  // 0 where there is no driver: then there are no tensors that would need one.
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver != 0 && driver / 1000 < CUDART_VERSION / 1000) {
    PyErr_Format(
        PyExc_ImportError,
        "specdec_ops was built with the CUDA toolkit %d.%d, and the driver of this machine supports CUDA "
        "up to %d.%d: install a newer driver, or build specdec_ops with an older toolkit",
        CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, driver / 1000, driver % 1000 / 10);
    return nullptr;
  }
  if (const char* missing = specdec_ops::cuda::bind_torch()) {
    PyErr_Format(PyExc_ImportError, "specdec_ops needs %s", missing);
    return nullptr;
  }
  return PyModule_Create(&module);
}
