use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::{Dims, KernelError};

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
    pub(crate) operation: &'static str,
    longest: usize,
}

impl Check {
    pub(crate) const fn of(operation: &'static str) -> Self {
        Self { operation, longest: 0 }
    }

    /// `[tokens, d_model]` of the input or the output of a branch.
    pub(crate) fn branch(&self, argument: &'static str, operand: &Operand) -> Result<[usize; 2], KernelError> {
        match *operand.shape {
            [tokens, d_model] if d_model > 0 => Ok([tokens, d_model]),
            _ => Err(self.wrong_shape(argument, operand, "[tokens, d_model] with d_model ≥ 1")),
        }
    }

    /// The capacity of a history, which has room for entry `entry`.
    pub(crate) fn room(&self, argument: &'static str, operand: &Operand, entry: usize) -> Result<usize, KernelError> {
        match *operand.shape {
            [capacity, _, _, _] if entry < capacity => Ok(capacity),
            [_, _, _, _] => Err(self.wrong_shape(
                argument,
                operand,
                &format!("[capacity, tokens, streams, d_model] with capacity ≥ {}", entry + 1),
            )),
            _ => Err(self.wrong_shape(argument, operand, "[capacity, tokens, streams, d_model]")),
        }
    }

    /// The sizes of an entry of a history of four axes.
    pub(crate) fn history(&self, value: &Operand) -> Result<Dims, KernelError> {
        match *value.shape {
            [_, tokens, streams @ (1..), d_model @ (1..)] => Ok(Dims { tokens, streams, d_model }),
            _ => Err(self.wrong_shape(
                "value",
                value,
                "[capacity, tokens, streams, d_model] with streams ≥ 1 and d_model ≥ 1",
            )),
        }
    }

    /// Reads and outputs of the queries of a pass.
    pub(crate) fn queries(&self, argument: &'static str, query: &Operand) -> Result<[usize; 2], KernelError> {
        match *query.shape {
            [reads @ (1..), outputs @ (1..), _] => Ok([reads, outputs]),
            _ => Err(self.wrong_shape(argument, query, "[reads, outputs, d_model] with reads ≥ 1 and outputs ≥ 1")),
        }
    }

    /// The length of the first axis, at least one.
    pub(crate) fn leading(&self, argument: &'static str, operand: &Operand) -> Result<usize, KernelError> {
        match *operand.shape {
            [length @ (1..), ..] => Ok(length),
            _ => Err(self.wrong_shape(argument, operand, "a first axis of length ≥ 1")),
        }
    }

    /// `index` is one of `length`, which `of` names.
    pub(crate) fn index(
        &mut self,
        argument: &'static str,
        index: usize,
        of: &str,
        length: usize,
    ) -> Result<&mut Self, KernelError> {
        if index < length {
            return Ok(self);
        }
        Err(KernelError::value(self.operation, argument, format!("less than the {length} {of}"), index))
    }

    /// `first + count` is at most `length`, which `of` names.
    pub(crate) fn range(
        &mut self,
        argument: &'static str,
        [first, count]: [usize; 2],
        of: &str,
        length: usize,
    ) -> Result<&mut Self, KernelError> {
        if first.checked_add(count).is_some_and(|end| end <= length) {
            return Ok(self);
        }
        let expected = format!("at most {}, as {count} of {length} {of} follow", length.saturating_sub(count));
        Err(KernelError::value(self.operation, argument, expected, first))
    }

    /// `eps` is a finite number ≥ 0.
    pub(crate) fn eps(&mut self, eps: f64) -> Result<&mut Self, KernelError> {
        self.epsilon("eps", eps)
    }

    pub(crate) fn epsilon(&mut self, argument: &'static str, eps: f64) -> Result<&mut Self, KernelError> {
        if eps.is_finite() && eps >= 0.0 {
            return Ok(self);
        }
        Err(KernelError::value(self.operation, argument, "a finite number ≥ 0", eps))
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
        Dims::expect(self.operation, argument, axes, expected, operand.shape)?;
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

    /// `operand` has this element type and this shape.
    pub(crate) fn fits(
        &mut self,
        argument: &'static str,
        operand: &Operand,
        dtype: ElemType,
        axes: &str,
        expected: &[usize],
    ) -> Result<&mut Self, KernelError> {
        self.dtype(argument, operand, dtype)?.shape(argument, operand, axes, expected)
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

    pub(crate) fn wrong_shape(&self, argument: &'static str, operand: &Operand, expected: &str) -> KernelError {
        let got = operand.shape.to_vec();
        KernelError::Shape { operation: self.operation, argument, expected: expected.into(), got }
    }

    fn wrong_type(&self, argument: &'static str, operand: &Operand, expected: String) -> KernelError {
        KernelError::ElementType { operation: self.operation, argument, expected, got: operand.dtype.to_string() }
    }
}
