// The CPU module. Importing it runs the registrations of csrc/cpu; what it exports is for tests and
// `python -m specdec_ops`.

#include <Python.h>

#include <cstdlib>

#include "cpu/kernels/isa.h"

namespace {

PyObject* cpu_isa(PyObject*, PyObject*) {
  return PyUnicode_FromString(specdec_ops::cpu::name_of(specdec_ops::cpu::current_isa()));
}

PyObject* available_cpu_isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  if (names == nullptr) return nullptr;
  for (specdec_ops::cpu::Isa isa : specdec_ops::cpu::available_isas()) {
    PyObject* name = PyUnicode_FromString(specdec_ops::cpu::name_of(isa));
    const int failed = name == nullptr ? -1 : PyList_Append(names, name);
    Py_XDECREF(name);
    if (failed != 0) {
      Py_DECREF(names);
      return nullptr;
    }
  }
  return names;
}

PyObject* set_cpu_isa(PyObject*, PyObject* argument) {
  PyObject* bytes = PyUnicode_AsUTF8String(argument);
  if (bytes == nullptr) return nullptr;
  const char* name = PyBytes_AsString(bytes);
  if (name == nullptr || !specdec_ops::cpu::set_isa(name)) {
    PyErr_Format(PyExc_ValueError, "set_cpu_isa: name must be an available tier, got %R", argument);
    Py_DECREF(bytes);
    return nullptr;
  }
  Py_DECREF(bytes);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"cpu_isa", cpu_isa, METH_NOARGS, "The instruction-set tier in use."},
    {"available_cpu_isas", available_cpu_isas, METH_NOARGS, "The tiers that can run here, lowest first."},
    {"set_cpu_isa", set_cpu_isa, METH_O, "Switches the tier, for tests and benchmarks."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  if (!specdec_ops::cpu::isa_cap_is_known()) {
    PyErr_Format(PyExc_ImportError, "SPECDEC_OPS_CPU_ISA must be scalar, avx2 or avx512, got '%s'",
                 std::getenv("SPECDEC_OPS_CPU_ISA"));
    return nullptr;
  }
  specdec_ops::cpu::current_isa();  // reads the environment, once
  return PyModule_Create(&module);
}
