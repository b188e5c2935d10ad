use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::KernelError;

/// A tensor of a caller: row-major, contiguous, on the device of the client.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// The buffer.
    pub handle: &'a Handle,
    /// The size of every axis, the last one fastest.
    pub shape: &'a [usize],
    /// The element type.
    pub dtype: ElemType,
}

impl<'a> Operand<'a> {
    /// A tensor from its parts.
    pub const fn new(handle: &'a Handle, shape: &'a [usize], dtype: ElemType) -> Self {
        Self { handle, shape, dtype }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// As a kernel argument of vectors of `lanes` elements.
    pub(crate) fn argument(&self, lanes: usize) -> BufferArg {
        // SAFETY: `Check` has seen that the buffer holds all elements.
        unsafe { BufferArg::from_raw_parts(self.handle.clone(), self.elements() / lanes) }
    }
}

/// f32 as an element type of an operand.
pub const F32: ElemType = ElemType::Float(FloatKind::F32);

/// Checks the operands of one call.
pub(crate) struct Check {
    operation: &'static str,
    longest: usize,
}

impl Check {
    pub(crate) const fn of(operation: &'static str) -> Self {
        Self { operation, longest: 0 }
    }

    /// `operand` has this shape, and its buffer holds it: a kernel would read a too short one as zeros on some devices
    /// and past its end on others.
    pub(crate) fn shape(
        &mut self,
        argument: &'static str,
        operand: &Operand,
        axes: &str,
        expected: &[usize],
    ) -> Result<&mut Self, KernelError> {
        crate::Dims::expect(self.operation, argument, axes, expected, operand.shape)?;
        let (needed, held) = (operand.elements() * operand.dtype.size(), operand.handle.size_in_used());
        if held < needed as u64 {
            return Err(KernelError::value(
                self.operation,
                argument,
                format!("a buffer of at least {needed} bytes for {axes} = {expected:?}"),
                format!("a buffer of {held} bytes"),
            ));
        }
        self.longest = self.longest.max(operand.elements());
        Ok(self)
    }

    /// `operand` is stored in f32, f16 or bf16, and the device has that type.
    pub(crate) fn storage(
        &mut self,
        argument: &'static str,
        operand: &Operand,
        client: &Client,
    ) -> Result<&mut Self, KernelError> {
        let kinds = [FloatKind::F32, FloatKind::F16, FloatKind::BF16];
        if !kinds.into_iter().any(|kind| operand.dtype == ElemType::Float(kind)) {
            return Err(self.wrong_type(argument, operand, "f32, f16 or bf16".into()));
        }
        if !client.properties().supports_type(operand.dtype) {
            let types = kinds.map(ElemType::Float).into_iter().filter(|&kind| client.properties().supports_type(kind));
            let types = types.map(|kind| kind.to_string()).collect::<Vec<_>>().join(" or ");
            return Err(self.wrong_type(argument, operand, format!("one that {} computes in: {types}", client.name())));
        }
        Ok(self)
    }

    /// `operand` has the element type `expected`.
    pub(crate) fn dtype(
        &mut self,
        argument: &'static str,
        operand: &Operand,
        expected: ElemType,
    ) -> Result<&mut Self, KernelError> {
        if operand.dtype == expected { Ok(self) } else { Err(self.wrong_type(argument, operand, expected.to_string())) }
    }

    /// The index type that reaches every element of the operands checked so far.
    pub(crate) fn address(&self, client: &Client) -> Result<AddressType, KernelError> {
        let address = AddressType::from_len(self.longest);
        if client.properties().supports_address(address) {
            return Ok(address);
        }
        Err(KernelError::value(
            self.operation,
            "elements of the longest operand",
            format!("at most {}, as {} has 32-bit indices only", u32::MAX, client.name()),
            self.longest,
        ))
    }

    fn wrong_type(&self, argument: &'static str, operand: &Operand, expected: String) -> KernelError {
        KernelError::ElementType { operation: self.operation, argument, expected, got: operand.dtype.to_string() }
    }
}
