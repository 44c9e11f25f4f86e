// The plain-torch reference of an operator, for what a kernel does not take: it also says what is wrong with arguments.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

namespace mindspeed {

template <class Signature> const c10::TypedOperatorHandle<Signature> find_operator(const char *name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The reference serves every device without a kernel of its own, so it is what such a device would run.
template <class Signature, class... Arguments>
auto call_reference(const c10::TypedOperatorHandle<Signature> &op, Arguments &&...arguments) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3), std::forward<Arguments>(arguments)...);
}

} // namespace mindspeed
