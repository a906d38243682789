//! The typed handle of a group of ranks. Every method is collective: all members call it, with requests that
//! fit each other, also those with zero rows. Rows are positions of dim 0, ranks positions in the group.
//! Outputs stand under [`plica_kernels::Category::CommBuffer`]. A group of one rank returns its input without
//! any traffic. `x_start` returns a [`Pending`]; the input must not be written before that is finished.

use std::sync::Arc;

use plica_kernels::{Category, Device, Shape, Tensor};

use crate::communicator::{Communicator, Operation, Purpose, Reduce, Request, Started};
use crate::error::CommError;
use crate::matching::check_request;
use crate::payload::{Message, Payload};
use crate::pending::{Exposed, Pending, PendingSend};
use crate::record::{Recorded, Recorder};

/// A group of ranks, as one of them sees it; clones are the same member of the same group.
#[derive(Clone)]
pub struct Group {
    communicator: Arc<Recorded>,
    device: Device,
    /// Where numbers that come from the host and go back to it are exchanged.
    host: Device,
}

impl Group {
    /// The typed handle of a backend's communicator. `device` is where the rank's tensors live.
    pub fn new(communicator: Arc<dyn Communicator>, recorder: Arc<Recorder>, device: Device) -> Group {
        let host = if device.gpu().is_some() { Device::cpu(1) } else { device.clone() };
        Group { communicator: Arc::new(Recorded::new(communicator, recorder)), device, host }
    }

    /// Own position.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.communicator.size()
    }

    /// World ranks of the members, by position.
    pub fn global_ranks(&self) -> &[usize] {
        self.communicator.global_ranks()
    }

    /// Name in messages.
    pub fn name(&self) -> &str {
        self.communicator.name()
    }

    /// Whether there is nobody else.
    pub fn is_single(&self) -> bool {
        self.size() == 1
    }

    /// Whether members can read each other's tensors in place.
    pub fn shares_memory(&self) -> bool {
        self.communicator.shares_memory()
    }

    /// Whether sums have the same bits over every backend of which this is true.
    pub fn sums_in_rank_order(&self) -> bool {
        self.communicator.sums_in_rank_order()
    }

    /// Where the rank's tensors live.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The books of the rank.
    pub fn recorder(&self) -> &Arc<Recorder> {
        self.communicator.recorder()
    }

    /// Ends the run with this cause, unless there is an earlier one.
    pub fn abort(&self, cause: &str) {
        self.communicator.abort(cause);
    }

    /// The group of some members (positions here, in the order that they shall have). All of them call it with
    /// the same name and list; nothing is sent.
    ///
    /// # Errors
    /// A list that names a rank twice, one outside the group, or not the caller.
    pub fn subgroup(&self, name: &str, members: &[usize]) -> Result<Group, CommError> {
        let communicator = Arc::new(self.communicator.gated_subgroup(name, members)?);
        Ok(Group { communicator, device: self.device.clone(), host: self.host.clone() })
    }

    /// The groups of parts of this one (positions here; a rank is in one part at most): that of the part which the
    /// caller is in, if it is in one. All members call it with the same name and parts.
    ///
    /// # Errors
    /// As for [`Group::subgroup`].
    pub fn partition(&self, name: &str, parts: &[Vec<usize>]) -> Result<Option<Group>, CommError> {
        let part = self.communicator.gated_partition(name, parts)?;
        Ok(part.map(|part| {
            let communicator = Arc::new(part);
            Group { communicator, device: self.device.clone(), host: self.host.clone() }
        }))
    }

    /// The group of all members with the same `color`, ordered by (`key`, position here).
    ///
    /// # Errors
    /// As [`Started::finish`].
    pub fn split(&self, color: u32, key: u32, name: &str) -> Result<Group, CommError> {
        let all = self.exchange_counts(Purpose::Control, &self.device, &[color as usize, key as usize])?;
        let mut members: Vec<usize> = (0..all.len()).filter(|&r| all[r][0] == color as usize).collect();
        members.sort_by_key(|&r| (all[r][1], r));
        self.subgroup(name, &members)
    }

    /// The device for numbers of the host, where a rank's tensors are on `device`: a GPU need not be waited for.
    fn host_of<'a>(&'a self, device: &'a Device) -> &'a Device {
        if device.gpu().is_some() { &self.host } else { device }
    }

    fn request(
        &self,
        operation: Operation,
        purpose: Purpose,
        payload: Option<Payload>,
        on: &Device,
    ) -> Request {
        Request { operation, purpose, payload, device: on.clone() }
    }

    fn start<T: Message>(
        &self,
        operation: Operation,
        purpose: Purpose,
        x: &Tensor<T>,
    ) -> Result<Box<dyn Started>, CommError> {
        let request = self.request(operation, purpose, Some(T::wrap(x.clone())), x.device());
        self.communicator.start(request)
    }

    /// Starts an operation that yields one tensor; alone, checks it and returns the input.
    fn pend<T: Message>(
        &self,
        operation: Operation,
        purpose: Purpose,
        x: &Tensor<T>,
    ) -> Result<Pending<T>, CommError> {
        if !self.is_single() {
            return Ok(Pending::started(self.start(operation, purpose, x)?));
        }
        let request = self.request(operation, purpose, Some(T::wrap(x.clone())), x.device());
        match check_request(&request.head(), 0, 1) {
            Ok(()) => Ok(Pending::ready(x.clone())),
            Err(text) => Err(CommError::Request {
                rank: self.global_ranks()[0],
                group: self.name().to_string(),
                operation: request.operation.name(),
                text,
            }),
        }
    }

    /// Reduces equal shapes element by element, in rank order; every rank gets all of it, the same bits.
    ///
    /// # Errors
    /// As [`Started::finish`]; so for all methods below.
    pub fn all_reduce<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        op: Reduce,
    ) -> Result<Tensor<T>, CommError> {
        self.all_reduce_start(purpose, x, op)?.finish()
    }

    /// As [`Group::all_reduce`].
    pub fn all_reduce_start<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        op: Reduce,
    ) -> Result<Pending<T>, CommError> {
        self.pend(Operation::AllReduce { op }, purpose, x)
    }

    /// Stacks the rows of all ranks, which all have as many.
    pub fn all_gather<T: Message>(&self, purpose: Purpose, x: &Tensor<T>) -> Result<Tensor<T>, CommError> {
        self.all_gather_start(purpose, x)?.finish()
    }

    /// As [`Group::all_gather`].
    pub fn all_gather_start<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
    ) -> Result<Pending<T>, CommError> {
        let own = x.dims().first().copied().unwrap_or(0);
        self.all_gather_rows_start(purpose, x, &vec![own; self.size()])
    }

    /// Stacks the rows of all ranks; rank r has `rows[r]`.
    pub fn all_gather_rows<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        rows: &[usize],
    ) -> Result<Tensor<T>, CommError> {
        self.all_gather_rows_start(purpose, x, rows)?.finish()
    }

    /// As [`Group::all_gather_rows`].
    pub fn all_gather_rows_start<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        rows: &[usize],
    ) -> Result<Pending<T>, CommError> {
        self.pend(Operation::AllGather { rows: rows.to_vec() }, purpose, x)
    }

    /// Sums equal shapes; each rank gets its equal part of the rows.
    pub fn reduce_scatter<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
    ) -> Result<Tensor<T>, CommError> {
        self.reduce_scatter_start(purpose, x)?.finish()
    }

    /// As [`Group::reduce_scatter`].
    pub fn reduce_scatter_start<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
    ) -> Result<Pending<T>, CommError> {
        // Rows that do not divide fail the check of the sum, with both numbers in the text.
        let each = x.dims().first().copied().unwrap_or(0) / self.size();
        self.reduce_scatter_rows_start(purpose, x, &vec![each; self.size()])
    }

    /// Sums equal shapes; rank r gets the r-th part of the rows, `rows[r]` of them.
    pub fn reduce_scatter_rows<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        rows: &[usize],
    ) -> Result<Tensor<T>, CommError> {
        self.reduce_scatter_rows_start(purpose, x, rows)?.finish()
    }

    /// As [`Group::reduce_scatter_rows`].
    pub fn reduce_scatter_rows_start<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        rows: &[usize],
    ) -> Result<Pending<T>, CommError> {
        self.pend(Operation::ReduceScatter { rows: rows.to_vec() }, purpose, x)
    }

    /// Sends `send_rows[r]` rows to rank r, in order, and gets `receive_rows[r]` rows from it, stacked by rank.
    pub fn all_to_all<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        send_rows: &[usize],
        receive_rows: &[usize],
    ) -> Result<Tensor<T>, CommError> {
        self.all_to_all_start(purpose, x, send_rows, receive_rows)?.finish()
    }

    /// As [`Group::all_to_all`].
    pub fn all_to_all_start<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        send_rows: &[usize],
        receive_rows: &[usize],
    ) -> Result<Pending<T>, CommError> {
        let (send_rows, receive_rows) = (send_rows.to_vec(), receive_rows.to_vec());
        self.pend(Operation::AllToAll { send_rows, receive_rows }, purpose, x)
    }

    /// The tensor of rank `root`; the others pass one of the same shape. The root gets its own tensor back.
    pub fn broadcast<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        root: usize,
    ) -> Result<Tensor<T>, CommError> {
        self.broadcast_start(purpose, x, root)?.finish()
    }

    /// As [`Group::broadcast`].
    pub fn broadcast_start<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        root: usize,
    ) -> Result<Pending<T>, CommError> {
        self.pend(Operation::Broadcast { root }, purpose, x)
    }

    /// Sends a tensor to rank `to` and waits until it has been received.
    ///
    /// In a ring, where every rank sends first, use [`Group::send_start`].
    pub fn send<T: Message>(&self, purpose: Purpose, x: &Tensor<T>, to: usize) -> Result<(), CommError> {
        self.send_start(purpose, x, to, 0)?.finish()
    }

    /// Starts a message; messages of one (source, target, tag) are received in their order.
    pub fn send_start<T: Message>(
        &self,
        purpose: Purpose,
        x: &Tensor<T>,
        to: usize,
        tag: u64,
    ) -> Result<PendingSend, CommError> {
        Ok(PendingSend::new(self.start(Operation::Send { to, tag }, purpose, x)?))
    }

    /// Receives a tensor of that shape from rank `from`.
    pub fn receive<T: Message>(
        &self,
        purpose: Purpose,
        device: &Device,
        from: usize,
        shape: impl Into<Shape>,
    ) -> Result<Tensor<T>, CommError> {
        self.receive_start(purpose, device, from, 0, shape)?.finish()
    }

    /// As [`Group::receive`], for the sequence of messages with that tag.
    pub fn receive_start<T: Message>(
        &self,
        purpose: Purpose,
        device: &Device,
        from: usize,
        tag: u64,
        shape: impl Into<Shape>,
    ) -> Result<Pending<T>, CommError> {
        let operation = Operation::Receive { from, tag, shape: shape.into(), dtype: T::DTYPE };
        let request = self.request(operation, purpose, None, device);
        Ok(Pending::started(self.communicator.start(request)?))
    }

    /// Returns when all members have called it.
    pub fn barrier(&self, purpose: Purpose) -> Result<(), CommError> {
        if self.is_single() {
            return Ok(());
        }
        let request = self.request(Operation::Barrier, purpose, None, &self.device);
        self.communicator.start(request)?.finish().map(|_| ())
    }

    /// The tensors of all members, to be read in place; shapes may differ. Nobody may write its tensor while a
    /// peer reads it: a barrier after the last read.
    ///
    /// # Errors
    /// [`CommError::NotShared`] where memory is not shared; else as [`Started::finish`].
    pub fn expose<T: Message>(&self, purpose: Purpose, x: &Tensor<T>) -> Result<Exposed<T>, CommError> {
        if self.is_single() {
            return Ok(Exposed::new(vec![x.clone()], x.device().clone(), None));
        }
        if !self.shares_memory() {
            return Err(CommError::NotShared { group: self.name().to_string() });
        }
        let payloads = self.start(Operation::Expose, purpose, x)?.finish()?.payloads;
        let source: Arc<dyn Communicator> = self.communicator.clone();
        let tensors = payloads.into_iter().map(T::unwrap).collect();
        Ok(Exposed::new(tensors, x.device().clone(), Some((source, purpose))))
    }

    /// All ranks' lists of counts, by rank; all lists have one length.
    pub fn exchange_counts(
        &self,
        purpose: Purpose,
        device: &Device,
        counts: &[usize],
    ) -> Result<Vec<Vec<usize>>, CommError> {
        let own: Vec<i64> = counts.iter().map(|&c| i64::try_from(c).expect("a count fits 63 bits")).collect();
        let x = Tensor::from_slice(self.host_of(device), [1, own.len()], &own, Category::CommBuffer);
        let all = self.all_gather(purpose, &x)?.to_vec();
        let row = |r: usize| all[r * own.len()..(r + 1) * own.len()].iter().map(|&c| c as usize).collect();
        Ok((0..self.size()).map(row).collect())
    }

    /// Reduces small host values.
    pub fn all_reduce_f64(
        &self,
        purpose: Purpose,
        device: &Device,
        values: &[f64],
        op: Reduce,
    ) -> Result<Vec<f64>, CommError> {
        let x = Tensor::from_slice(self.host_of(device), [values.len()], values, Category::CommBuffer);
        Ok(self.all_reduce(purpose, &x, op)?.to_vec())
    }
}
